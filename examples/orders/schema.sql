-- The shop's own tables, and the outbox that it had before Outflow: topic, message, state. Nobody reads or writes state any more.

CREATE TABLE orders (
  id uuid PRIMARY KEY, item text NOT NULL, quantity int NOT NULL CHECK (quantity > 0), placed_at timestamptz NOT NULL DEFAULT now());

CREATE TABLE outbox (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL, message jsonb NOT NULL, state text NOT NULL DEFAULT 'pending',
  created_at timestamptz NOT NULL DEFAULT now());

CREATE TABLE stock (item text PRIMARY KEY, available int NOT NULL CHECK (available >= 0));

-- No key on order_id: that each order is here once is the consumer's doing, and the demo counts.
CREATE TABLE reservation (order_id uuid NOT NULL, item text NOT NULL, quantity int NOT NULL, reserved boolean NOT NULL);
