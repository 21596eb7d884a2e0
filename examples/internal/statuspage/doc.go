// Package statuspage tests Outflow's status page in a browser. It is in this module because the browser's
// driver is.
package statuspage
