// Package archive keeps the cold part of a stream outside of NATS: a prefix of the stream that ends at or
// below the confirmed checkpoint, as JSON lines in zstd.
//
// # Layout
//
//	v1/<stream>-<created>/00000000000000000001-00000000000000065536.jsonl.zst   a segment's messages
//	v1/<stream>-<created>/00000000000000000001.json                            its manifest
//
// A segment begins where the one before it ends, and is never changed. Its manifest is named by its first
// sequence alone and is created only if there is none: whoever creates it has decided where the segment ends.
// So two archivers at once need no lease. Each writes messages under a name of its own, or finds the same
// messages there, and only one manifest comes into being; the other one reads it and goes on behind it. That
// holds however long one of them sleeps before it creates the manifest. An object that no manifest names is
// no segment.
//
// # What a manifest means
//
// A manifest is created after the object was read back whole and was found to hold the messages, so where
// there is a manifest its messages are archived. Manifests are a chain: each has a hash of what it says about
// its messages, which includes the hash of the one before it. The object's own hash is not part of it, nor
// are the hashes of documents: an erasure writes an object anew, and chain and Merkle root stay, as what is
// left of a message that was erased is its hash.
//
// Nothing of an object is believed: sizes are bounded before they are read, names are made and never taken
// from a manifest, and the hashes of its messages are made from what the lines say.
package archive
