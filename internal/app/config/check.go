package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outflowhq/outflow/internal/relay"
	"github.com/outflowhq/outflow/outbox"
)

func usageFault(message, hint string) error {
	return &outbox.Fault{Class: outbox.Usage, Message: message, Hint: hint}
}

// rules are those that read more than one setting.
var rules = []Check{
	{[]string{"nats.url", "nats.context"}, func(c Config) error {
		switch {
		case c.NATS.URL == "" && c.NATS.Context == "":
			return usageFault("no server", "Set nats.url or nats.context")
		case c.NATS.URL != "" && c.NATS.Context != "":
			return usageFault(c.describe("nats.context")+" names servers as well", "Leave one of them out")
		}
		return nil
	}},
	{[]string{"nats", "nats.context", "nats.creds", "nats.nkey", "nats.user", "nats.token", "nats.token_file",
		"nats.url"}, oneLogin},
	{[]string{"nats.password", "nats.password_file"}, func(c Config) error {
		if c.NATS.Password != "" && c.NATS.PasswordFile != "" {
			return usageFault(c.describe("nats.password_file")+" is set as well", "Leave one of them out")
		}
		return nil
	}},
	{[]string{"nats.user", "nats.password", "nats.password_file"}, func(c Config) error {
		if c.NATS.User == "" && (c.NATS.Password != "" || c.NATS.PasswordFile != "") {
			return usageFault("there is a password without a user", "Set nats.user")
		}
		return nil
	}},
	{[]string{"nats.token", "nats.token_file"}, func(c Config) error {
		if c.NATS.Token != "" && c.NATS.TokenFile != "" {
			return usageFault(c.describe("nats.token_file")+" is set as well", "Leave one of them out")
		}
		return nil
	}},
	{[]string{"nats.tls.cert", "nats.tls.key"}, func(c Config) error {
		if (c.NATS.TLS.Cert == "") != (c.NATS.TLS.Key == "") {
			return usageFault(c.describe("nats.tls.key"), "Set both or neither")
		}
		return nil
	}},
	{[]string{"cluster.id", "cluster.count"}, func(c Config) error {
		if c.Cluster.Count > 0 && (c.Cluster.ID == 0 || c.Cluster.ID > c.Cluster.Count) {
			return usageFault("not one of "+c.describe("cluster.count"),
				"Give each cluster a number of its own, from 1 to the count")
		}
		return nil
	}},
	{[]string{"replication.origin", "cluster.id"}, func(c Config) error {
		if c.Cluster.ID > 0 && c.Replication.Origin == OriginAny {
			return usageFault("rows of other clusters would be published here as well as there: "+
				c.describe("cluster.id")+" is one of several", "Leave replication.origin out")
		}
		return nil
	}},
	{[]string{"cluster.control", "cluster.id", "source", "shard"}, func(c Config) error {
		switch {
		case c.Cluster.Control == "":
		case c.Cluster.ID == 0:
			return usageFault("there is one database, "+c.describe("cluster.id")+", and nobody reads its "+
				"rows elsewhere", "Set cluster.id, or leave cluster.control out")
		case c.Source != relay.FromTable:
			return usageFault(c.describe("source")+" brings logical messages, which are not replicated",
				"Leave cluster.control out, or set source to table")
		case !c.Shard.Whole():
			return usageFault("the rows of a divided table can't be read on another cluster: "+
				c.describe("shard"), "Leave cluster.control or shard out")
		case sameTable(c.Cluster.Control, c.Table):
			return usageFault("the outbox itself: "+c.describe("table"),
				"Give the control table a name of its own")
		}
		return nil
	}},
	{[]string{"cluster.subscription", "cluster.control"}, func(c Config) error {
		if c.Cluster.Subscription != "" && c.Cluster.Control == "" {
			return usageFault("the home's ticks and settings come as rows of a control table, and there is "+
				"none", "Set cluster.control to what it is at home")
		}
		return nil
	}},
	{[]string{"cluster.mode", "cluster.id", "cluster.count", "cluster.control", "cluster.maximum_delay",
		"cluster.subscriptions", "cluster.subscription", "cluster.gone", "sink.durable_after",
		"reorder.mode", "reorder.tick"}, modes},
	{[]string{"shard", "source"}, func(c Config) error {
		if !c.Shard.Whole() && c.Source != relay.FromTable {
			return usageFault(c.describe("source")+" brings logical messages, and PostgreSQL's row filters "+
				"divide rows alone: each shard would publish all messages",
				"Leave shard out, or set source to table")
		}
		return nil
	}},
	{[]string{"reorder.cold", "reorder.bound"}, func(c Config) error {
		if c.Reorder.Cold > c.Reorder.Bound {
			return usageFault("longer than "+c.describe("reorder.bound"), "Give at most that")
		}
		return nil
	}},
	{[]string{"reorder.mode", "columns.counter"}, func(c Config) error {
		if c.Reorder.Mode == ModeGap && c.Columns.Counter.Name == "" {
			return usageFault("gap mode orders events by their counters, and "+
				c.describe("columns.counter")+" says that there are none",
				"Set columns.counter to the column that counts the events of an actor, or reorder.mode to "+
					"horizon")
		}
		return nil
	}},
	{[]string{"retain.other_slots", "slot"}, func(c Config) error {
		if slices.Contains(c.Retain.OtherSlots, c.Slot) {
			return usageFault("one of them is Outflow's own, "+c.describe("slot")+", and rows would go "+
				"before they are published", "Name only slots that somebody else reads")
		}
		return nil
	}},
	{[]string{"init.partition.by", "columns", "headers"}, func(c Config) error {
		by := c.Init.Partition.By
		for _, role := range []Column{c.Columns.ID, c.Columns.Doc, c.Columns.Actor, c.Columns.Counter,
			c.Columns.Span, c.Columns.Key, c.Columns.Payload} {
			if by != "" && role.Name == by {
				return usageFault(c.describe("init.partition.by")+" is the column of another role as well",
					"Give the column of the time when a row was written, such as created_at")
			}
		}
		return nil
	}},
	{[]string{"init.max_age"}, func(c Config) error {
		if age := c.Init.MaxAge; age > 0 && age < 100*time.Millisecond {
			return usageFault("JetStream refuses less than 100ms", "Give "+byPath["init.max_age"].want)
		}
		return nil
	}},
	{[]string{"init.max_age", "sink.durable_after"}, func(c Config) error {
		if age := c.Init.MaxAge; age > 0 && age/2 < c.Sink.DurableAfter {
			return usageFault("below twice "+c.describe("sink.durable_after")+
				", messages would be gone before they count as durable",
				"Give 0s or at least twice that")
		}
		return nil
	}},
}

// leastDelay is the least cluster.maximum_delay where one cluster does another one's work. In the shared mode
// whoever makes the stream gives a sign of life four times in it, and at most one a second; a start, which
// gives none, takes less than a second as a rule. In the islands mode it is eight times in it, and a row that
// takes a quarter of it to be written is not written.
const leastDelay = 5 * time.Second

// modes refuses what the shared and the islands mode can't go with.
func modes(c Config) error {
	l := c.Cluster
	refuse := func(setting, why, hint string) error {
		return usageFault(c.describe(setting)+": "+why, hint+", or set cluster.mode to none")
	}
	switch {
	case l.Mode == ModeNone:
		return nil
	case l.ID == 0 || l.Count < 2:
		return refuse("cluster.count", "at least two clusters go on for one another",
			"Set cluster.id and cluster.count")
	case l.Control == "":
		return refuse("cluster.control", "without a control table clusters can't say anything to one another",
			"Set cluster.control")
	case l.MaximumDelay < leastDelay:
		return refuse("cluster.maximum_delay", "a cluster would be taken for silent while it lives",
			"Set at least "+leastDelay.String())
	case c.Reorder.Tick == TickOff:
		return refuse("reorder.tick", "what an idle home has written last would be open everywhere",
			"Set reorder.tick to wal")
	case l.Shared() && c.Sink.DurableAfter != 0:
		return refuse("sink.durable_after", "what was read and then lost by NATS could come again in "+
			"another order after a take-over",
			"Let the NATS servers sync each write (sync_interval: always) and set sink.durable_after to 0s")
	case l.Islands() && c.Reorder.Mode == ModeGap:
		return refuse("reorder.mode", "what is left to other clusters is not in the stream, from which gap "+
			"mode reads what it remembers", "Set reorder.mode to horizon")
	case l.Islands():
		return subscriptions(c, refuse)
	}
	return nil
}

// subscriptions refuses all but one subscription for each other cluster.
func subscriptions(c Config, refuse func(setting, why, hint string) error) error {
	l, others := c.Cluster, c.Cluster.Others()
	for n := 1; n <= l.Count; n++ {
		if n != l.ID && others[n] == "" {
			return refuse("cluster.subscriptions", fmt.Sprintf("there is none of cluster %d", n),
				"Name for each other cluster the subscription that brings its rows, as in 2=from_2,3=from_3")
		}
	}
	switch named := slices.Collect(maps.Values(others)); {
	case len(others) != l.Count-1:
		return refuse("cluster.subscriptions", fmt.Sprintf("there is one of a cluster that is not one of "+
			"the %d others", l.Count-1), "Name one for each other cluster alone")
	case l.Subscription != "" && !slices.Contains(named, l.Subscription):
		return refuse("cluster.subscription", "it is not one of "+c.describe("cluster.subscriptions"),
			"Name it for the cluster whose rows it brings")
	}
	for _, n := range l.GoneForGood() {
		if others[n] == "" {
			return refuse("cluster.gone", fmt.Sprintf("%d is not one of the %d other clusters", n, l.Count-1),
				"Name other clusters alone")
		}
	}
	return nil
}

// oneLogin refuses more than one way to authenticate: the client library would choose between them.
func oneLogin(c Config) error {
	n := c.NATS
	var set []string
	for _, w := range []struct {
		path string
		set  bool
	}{
		{"nats.context", n.Context != ""}, {"nats.creds", n.Creds != ""}, {"nats.nkey", n.NKey != ""},
		{"nats.user", n.User != ""}, {"nats.token", n.Token != ""},
		{"nats.token_file", n.TokenFile != "" && n.Token == ""},
		{"nats.url", strings.Contains(n.URL, "@")},
	} {
		if w.set {
			set = append(set, c.describe(w.path))
		}
	}
	if len(set) < 2 {
		return nil
	}
	return usageFault("more than one way to authenticate: "+strings.Join(set, ", "), "Leave one")
}

// Login returns the password and the token, read from their files if settings name files. Call it for each
// new connection, so that a changed secret is used.
func (n NATS) Login() (password, token string, err error) {
	password, token = n.Password, n.Token
	if n.PasswordFile != "" {
		if password, err = readSecret("nats.password_file", n.PasswordFile); err != nil {
			return "", "", err
		}
	}
	if n.TokenFile != "" {
		if token, err = readSecret("nats.token_file", n.TokenFile); err != nil {
			return "", "", err
		}
	}
	return password, token, nil
}

func readSecret(path, name string) (string, error) {
	data, err := readFile(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}
