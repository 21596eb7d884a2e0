// Package drivers tests package consumer with drivers of database/sql that its users may have, and that are
// not to be among its own dependencies.
package drivers
