// Checks a dashboard, a file, against the schema that Grafana publishes for Go: unknown and missing fields, and types,
// of the dashboard and of the options of its panels and queries.
package main

import (
	"log"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	// Options of other panels are not checked: the test refuses these.
	runtime := cog.NewRuntime()
	runtime.RegisterDataqueryVariant(prometheus.VariantConfig())
	runtime.RegisterPanelcfgVariant(heatmap.VariantConfig())
	runtime.RegisterPanelcfgVariant(stat.VariantConfig())
	runtime.RegisterPanelcfgVariant(timeseries.VariantConfig())

	text, err := os.ReadFile(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	var board dashboard.Dashboard
	// It returns an empty error if it finds no fault.
	if err := board.UnmarshalJSONStrict(text); err != nil && err.Error() != "" {
		log.Fatal(err)
	}
	if err := board.Validate(); err != nil {
		log.Fatal(err)
	}
}
