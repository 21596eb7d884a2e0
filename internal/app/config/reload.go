package config

// Reload returns the configuration with what a running process takes over of another one: taken lists the
// settings that it takes over, others those that differ and need a restart.
func (c Config) Reload(next Config) (reloaded Config, taken, others []string) {
	for i := range settings {
		s := &settings[i]
		now, then := s.bind(&c), s.bind(&next).text()
		switch {
		case now.text() == then:
		case s.reloads && now.set(then) == nil:
			taken = append(taken, s.path)
		default:
			others = append(others, s.path)
		}
	}
	return c, taken, others
}
