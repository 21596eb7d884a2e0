-- The service's own tables.

CREATE TABLE IF NOT EXISTS document (
  id text PRIMARY KEY,
  version bigint NOT NULL DEFAULT 0);      -- how many operations it has had: the marker that each transaction moves

CREATE TABLE IF NOT EXISTS operation (
  doc_id text NOT NULL REFERENCES document,
  version bigint NOT NULL,
  actor text NOT NULL,
  counter bigint NOT NULL,
  body jsonb NOT NULL,
  PRIMARY KEY (doc_id, version),
  UNIQUE (doc_id, actor, counter));

-- The outbox. Outflow needs no more than the first six columns; published_at is for the polling relay beside it.
CREATE TABLE IF NOT EXISTS outbox (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  doc_id text NOT NULL,
  actor_id text NOT NULL,
  counter bigint NOT NULL,
  seq_key text COLLATE "C" NOT NULL GENERATED ALWAYS AS (actor_id || ':' || lpad(counter::text, 20, '0')) STORED,
  payload jsonb NOT NULL,
  published_at timestamptz);

CREATE INDEX IF NOT EXISTS outbox_unpublished ON outbox (id) WHERE published_at IS NULL;
