// Package consumertest tests handlers of package consumer with the real engine and a real PostgreSQL, but
// with events from memory and crashes on demand. It needs no NATS server.
//
//	func TestHandler(t *testing.T) {
//		pool := ... // a database of the test's own, with the tables of the handler
//		events := []consumertest.Event{
//			{Document: "order-1", Type: "created", Data: []byte(`{"item": "pear", "n": 2}`)},
//			{Document: "order-1", Type: "paid", Data: []byte(`{}`)},
//		}
//		consumertest.ExactlyOnce(t, pool, handle, events, consumertest.Tables(pool, "orders", "stock"))
//	}
//
// [ExactlyOnce] runs the handler undisturbed, then with a crash at every point of every event, then with a
// failure of every first attempt, and compares the effects. It catches a handler that has an effect outside
// its transaction: the effect appears twice, or was left by an attempt that was rolled back. It also catches
// one that depends on state in memory, if [Kit.Start] makes the handler.
//
// [Golden] compares the results of upcasters with files. [Stream] and [Crash] are the building blocks, for
// other tests.
package consumertest
