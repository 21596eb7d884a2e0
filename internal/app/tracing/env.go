package tracing

import (
	"fmt"
	"strings"
)

// The variables that decide whether spans are exported. The SDK and the exporter read the others themselves.
const (
	envDisabled       = "OTEL_SDK_DISABLED"
	envExporter       = "OTEL_TRACES_EXPORTER"
	envEndpoint       = "OTEL_EXPORTER_OTLP_ENDPOINT"
	envTracesEndpoint = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	envProtocol       = "OTEL_EXPORTER_OTLP_PROTOCOL"
	envTracesProtocol = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
)

// enabled reports whether the environment asks for spans: with an endpoint, or with otlp as the exporter,
// whose default endpoint then applies. why says what it asks for that there is not; spans are off then.
func enabled(getenv func(string) string) (on bool, why string) {
	get := func(name string) string { return strings.TrimSpace(getenv(name)) }
	exporter := get(envExporter)
	if strings.EqualFold(get(envDisabled), "true") || exporter == "none" ||
		exporter == "" && get(envEndpoint) == "" && get(envTracesEndpoint) == "" {
		return false, ""
	}
	if exporter != "" && exporter != "otlp" {
		return false, fmt.Sprintf("%s is %q, and the only exporter here is otlp", envExporter, exporter)
	}
	name := envTracesProtocol
	if get(name) == "" {
		name = envProtocol
	}
	switch protocol := get(name); protocol {
	case "", "http/protobuf", "http/json":
		return true, ""
	default:
		return false, fmt.Sprintf("%s is %q, and OTLP is spoken over HTTP only here. Set "+
			"%s=http/protobuf, and %s to the collector's port for HTTP, usually 4318", name, protocol,
			envTracesProtocol, envTracesEndpoint)
	}
}
