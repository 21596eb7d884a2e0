package main

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/outflowhq/outflow/consumer"
)

// The payload has had three forms, and the stream keeps events of all of them. Each upcaster makes one step,
// so that a fourth form needs one more, and none of these changes. testdata holds an event of each form, and
// what it becomes.

type movementV1 struct {
	Item   string `json:"item"`
	Boxes  int64  `json:"boxes"`
	PerBox int64  `json:"per_box"`
}

type movementV2 struct {
	SKU      string `json:"sku"`
	Quantity int64  `json:"quantity"`
}

// movement is the present form.
type movement struct {
	SKU       string `json:"sku"`
	Quantity  int64  `json:"quantity"`
	Warehouse string `json:"warehouse"`
}

// payloads is the way from each form to the present one. Rows that are older than the column schema_version
// have none: they are of version 1.
var payloads = &consumer.Schema{
	Current: "3",
	From:    consumer.HeaderVersion("Schema-Version"),
	Missing: "1",
	Up: map[string]consumer.Up{
		"1": {To: "2", Do: countPieces},
		"2": {To: "3", Do: nameWarehouse},
	},
}

// countPieces: boxes became pieces.
func countPieces(data []byte) ([]byte, error) {
	var v movementV1
	if err := decode(data, &v); err != nil {
		return nil, err
	}
	if v.Item == "" || v.PerBox < 1 {
		return nil, errors.New("no item, or no number of pieces in a box")
	}
	return json.Marshal(movementV2{SKU: v.Item, Quantity: v.Boxes * v.PerBox})
}

// nameWarehouse: there was one warehouse before there were several.
func nameWarehouse(data []byte) ([]byte, error) {
	var v movementV2
	if err := decode(data, &v); err != nil {
		return nil, err
	}
	return json.Marshal(movement{SKU: v.SKU, Quantity: v.Quantity, Warehouse: "main"})
}

// decode takes nothing that it does not know: what an upcaster passes over is lost.
func decode(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return d.Decode(v)
}
