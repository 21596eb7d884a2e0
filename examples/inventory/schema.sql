-- The warehouse's outbox: partitioned by month, with the columns that consumers get as headers.

CREATE TABLE outbox_events (
  event_id uuid NOT NULL DEFAULT gen_random_uuid(),
  aggregate_type text NOT NULL, aggregate_id text NOT NULL, event_type text NOT NULL,
  partition_key text NOT NULL,
  schema_version int,          -- of the payload; NULL in rows that are older than this column
  payload jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (event_id, created_at)
) PARTITION BY RANGE (created_at);

DO $$
DECLARE month timestamptz := date_trunc('month', now());
BEGIN
  FOR i IN 1..3 LOOP
    EXECUTE format('CREATE TABLE outbox_events_%s PARTITION OF outbox_events FOR VALUES FROM (%L) TO (%L)',
      to_char(month, 'YYYY_MM'), month, month + interval '1 month');
    month := month + interval '1 month';
  END LOOP;
END $$;

-- What the consumer makes of it: how much there is, and the ledger that says which event made it so, and which deploy.

CREATE TABLE stock (warehouse text NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, PRIMARY KEY (warehouse, sku));

CREATE TABLE ledger (
  sequence bigint PRIMARY KEY, -- of the event in the stream
  warehouse text NOT NULL, sku text NOT NULL, quantity bigint NOT NULL, -- how much there was after it
  deploy text NOT NULL);
