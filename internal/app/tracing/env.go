package tracing

import (
	"fmt"
	"strings"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
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

// possible replaces what the OTEL_BSP_ variables must not say: the SDK takes a size as it is, and panics, or
// asks for all memory; without a delay it never rests, and without a limit a silent collector is the last.
func possible(o *sdktrace.BatchSpanProcessorOptions) {
	if o.MaxQueueSize <= 0 || o.MaxQueueSize > maxQueue {
		o.MaxQueueSize = sdktrace.DefaultMaxQueueSize
	}
	if o.MaxExportBatchSize <= 0 || o.MaxExportBatchSize > o.MaxQueueSize {
		o.MaxExportBatchSize = min(sdktrace.DefaultMaxExportBatchSize, o.MaxQueueSize)
	}
	if o.BatchTimeout <= 0 {
		o.BatchTimeout = sdktrace.DefaultScheduleDelay * time.Millisecond
	}
	if o.ExportTimeout <= 0 {
		o.ExportTimeout = sdktrace.DefaultExportTimeout * time.Millisecond
	}
}

// maxQueue is the greatest size of the SDK's queue, in spans of about a kilobyte.
const maxQueue = 1 << 16
