-- The warehouse's outbox, with the columns that consumers get as headers. It is partitioned by five seconds, as another one is by day:
-- outflow maintain makes the next partitions, and takes the old ones away.

CREATE TABLE outbox_events (
  event_id uuid NOT NULL DEFAULT gen_random_uuid(),
  aggregate_type text NOT NULL, aggregate_id text NOT NULL, event_type text NOT NULL,
  partition_key text NOT NULL,
  schema_version int,          -- of the payload; NULL in rows that are older than this column
  payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (event_id, created_at)
) PARTITION BY RANGE (created_at);

DO $$ -- for as long as it takes to start it
DECLARE at timestamptz := date_bin('5 seconds', now(), '2001-01-01');
BEGIN
  FOR i IN 1..24 LOOP
    EXECUTE format('CREATE TABLE outbox_events_%s PARTITION OF outbox_events FOR VALUES FROM (%L) TO (%L)',
      to_char(at, 'YYYYMMDD_HH24MISS'), at, at + interval '5 seconds');
    at := at + interval '5 seconds';
  END LOOP;
END $$;

-- What the consumer makes of it: how much there is, and the ledger that says which event made it so, and which deploy.

CREATE TABLE stock (warehouse text NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, PRIMARY KEY (warehouse, sku));

CREATE TABLE ledger (
  sequence bigint PRIMARY KEY, -- of the event in the stream
  warehouse text NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, -- how much there was after it
  deploy text NOT NULL);

-- What another consumer makes of it, which was thought of later: how much was ever shipped.

CREATE TABLE shipped (warehouse text NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, events bigint NOT NULL,
  PRIMARY KEY (warehouse, sku));
