// Package consumertest tests handlers of package consumer: with the real engine and a real PostgreSQL, but
// with events from memory and crashes at will. It needs no NATS server.
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
// failure of every first attempt, and compares what the runs leave behind. A handler that has an effect
// outside of its transaction is found: the effect is there twice, or an attempt that was rolled back has left
// it. So is one that depends on what it keeps in memory, if [Kit.Start] makes it.
//
// [Golden] holds upcasters to a file for each old version. [Stream] and [Crash] are what the kit is made of,
// for tests of another kind.
package consumertest
