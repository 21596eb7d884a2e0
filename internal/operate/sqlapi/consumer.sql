CREATE OR REPLACE FUNCTION outflow.hash(document text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
-- The 32-bit FNV-1a hash of a document; modulo the number of partitions it is the partition.
DECLARE
  h bigint := 2166136261;
  b bytea := convert_to(hash.document, 'UTF8');
BEGIN
  FOR at IN 0 .. length(b) - 1 LOOP
    h := ((h # get_byte(b, at)) * 16777619) & 4294967295;
  END LOOP;
  RETURN h;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.bound(most text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
-- Bounds a transaction that locks rows which others wait for, where its session has no bounds of its own: the
-- server ends that of a program which freezes.
BEGIN
  PERFORM set_config(s.name, bound.most, true)
    FROM unnest('{lock_timeout,statement_timeout,idle_in_transaction_session_timeout}'::text[]) s (name)
    WHERE current_setting(s.name) = '0';
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.start(name text, stream text, stream_created timestamptz, filters text[],
  keying text, partitions int) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Makes a consumer that has done nothing yet. False: it is there. OF004: it is there, and is another one.
DECLARE
  c record;
  e bigint;
BEGIN
  IF start.partitions IS NULL OR start.partitions NOT BETWEEN 1 AND 4096 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
      MESSAGE = format('outflow.start: partitions %s: want 1 to 4096', coalesce(start.partitions::text, 'NULL'));
  END IF;
  PERFORM outflow.bound('5s');
  INSERT INTO outflow.outflow_consumer (name, stream, filters, keying, partitions)
    VALUES (start.name, start.stream, start.filters, '', 0) ON CONFLICT (name) DO NOTHING;
  SELECT * INTO c FROM outflow.outflow_consumer t WHERE t.name = start.name FOR UPDATE;
  IF c.stream <> start.stream OR c.partitions > 0 AND (c.keying <> start.keying OR c.filters <> start.filters
    OR abs(extract(epoch FROM c.stream_created - start.stream_created)) > 0.001) THEN -- clients round it
    RAISE EXCEPTION USING ERRCODE = 'OF004',
      MESSAGE = format('outflow.start: consumer %s reads stream %s of %s, filters %s, keying %s', start.name,
        c.stream, c.stream_created, c.filters, quote_literal(c.keying)),
      HINT = 'Give the new consumer another name: marks belong to a stream.';
  END IF;
  IF c.partitions > 0 THEN
    RETURN false;
  END IF;
  UPDATE outflow.outflow_consumer t SET keying = start.keying, partitions = start.partitions,
    filters = start.filters, stream_created = start.stream_created, epoch = t.epoch + 1
    WHERE t.name = start.name RETURNING t.epoch INTO e;
  INSERT INTO outflow.outflow_mark (name, source, partition, epoch, seq, due, n, lsn, i)
    SELECT start.name, 'live', p, e, 0, '0/0', 0, '0/0', 0 FROM generate_series(0, start.partitions - 1) p;
  RETURN true;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.claim(name text, instance text, keying text, lease interval)
RETURNS TABLE (source text, partition int, partitions int, epoch bigint, seq bigint, barrier bigint, due pg_lsn, n bigint, holed boolean)
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Joins, or stays, takes this instance's share of the partitions under a new epoch, and returns their marks.
DECLARE
  c record;
  top record;
  e bigint;
  quota int;
  taken int[];
BEGIN
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION USING ERRCODE = 'active_sql_transaction',
      MESSAGE = 'outflow.claim: it needs a transaction of its own, READ COMMITTED';
  END IF;
  PERFORM outflow.bound('5s');
  SELECT * INTO c FROM outflow.outflow_consumer t WHERE t.name = claim.name FOR UPDATE;
  IF NOT FOUND OR c.partitions = 0 THEN
    RAISE EXCEPTION USING ERRCODE = 'OF004', MESSAGE = format('outflow.claim: there is no consumer %s',
      claim.name), HINT = 'Call outflow.start first.';
  END IF;
  DELETE FROM outflow.outflow_member t WHERE t.name = claim.name AND t.instance <> claim.instance
    AND t.expires < clock_timestamp();
  INSERT INTO outflow.outflow_member AS t (name, instance, joined, expires)
    VALUES (claim.name, claim.instance, clock_timestamp(), clock_timestamp() + claim.lease)
    ON CONFLICT (name, instance) DO UPDATE SET expires = excluded.expires;
  IF c.wanted_partitions IS NOT NULL AND c.barrier IS NOT NULL THEN
    PERFORM FROM outflow.outflow_mark t WHERE t.name = claim.name FOR UPDATE SKIP LOCKED;
    GET DIAGNOSTICS quota = ROW_COUNT;
    SELECT max(t.seq) FILTER (WHERE t.source = 'live') AS seq, count(*) AS marks, bool_or(t.holed) AS holed,
      count(DISTINCT (t.source, t.seq)) = count(DISTINCT t.source) AS together
      INTO top FROM outflow.outflow_mark t WHERE t.name = claim.name;
    -- A locked row belongs to a transaction that may still move it.
    IF quota = top.marks AND top.seq > c.barrier THEN
      UPDATE outflow.outflow_consumer t SET barrier = top.seq WHERE t.name = claim.name;
      c.barrier := top.seq;
    ELSIF quota = top.marks AND top.seq = c.barrier AND top.together AND NOT top.holed THEN
      UPDATE outflow.outflow_consumer t SET epoch = t.epoch + 1, keying = t.wanted_keying,
        partitions = t.wanted_partitions, wanted_keying = NULL, wanted_partitions = NULL, barrier = NULL
        WHERE t.name = claim.name RETURNING * INTO c;
      WITH old AS (DELETE FROM outflow.outflow_mark t WHERE t.name = claim.name RETURNING t.*),
        at AS (SELECT DISTINCT ON (old.source) old.* FROM old ORDER BY old.source, old.seq DESC)
      INSERT INTO outflow.outflow_mark (name, source, partition, epoch, seq, due, n, lsn, i)
        SELECT at.name, at.source, p, c.epoch, at.seq, at.due, at.n, at.lsn, at.i
        FROM at, generate_series(0, c.partitions - 1) p;
    END IF;
  END IF;
  IF c.keying IS DISTINCT FROM claim.keying THEN
    RAISE EXCEPTION USING ERRCODE = 'OF004', MESSAGE = format('outflow.claim: consumer %s has keying %s, not %s',
        claim.name, quote_literal(c.keying), quote_literal(claim.keying)),
      HINT = 'Documents are divided in another way: whoever divides them so takes part.';
  END IF;
  SELECT c.partitions / count(*) + CASE WHEN count(*) FILTER (WHERE (t.joined, t.instance) < (me.joined,
      me.instance)) < c.partitions % count(*) THEN 1 ELSE 0 END INTO quota
    FROM outflow.outflow_member t, outflow.outflow_member me
    WHERE t.name = claim.name AND me.name = claim.name AND me.instance = claim.instance;
  UPDATE outflow.outflow_mark t SET owner = NULL WHERE t.name = claim.name AND t.source = 'live' AND t.partition IN (
    SELECT o.partition FROM outflow.outflow_mark o WHERE o.name = claim.name AND o.source = 'live'
      AND o.owner = claim.instance ORDER BY o.partition OFFSET quota);
  WITH free AS (SELECT t.partition FROM outflow.outflow_mark t WHERE t.name = claim.name AND t.source = 'live'
      AND (t.owner = claim.instance OR NOT EXISTS (SELECT FROM outflow.outflow_member m
        WHERE m.name = claim.name AND m.instance = t.owner))
      ORDER BY t.owner IS DISTINCT FROM claim.instance, t.partition LIMIT quota FOR UPDATE SKIP LOCKED)
  SELECT array_agg(free.partition) INTO taken FROM free;
  -- Nor is one claimed whose mark of a replay somebody has locked.
  WITH open AS (SELECT t.partition FROM outflow.outflow_mark t WHERE t.name = claim.name
      AND t.partition = ANY (taken) FOR UPDATE SKIP LOCKED)
  SELECT array_agg(o.partition) INTO taken FROM (SELECT open.partition FROM open GROUP BY open.partition
    HAVING count(*) = (SELECT count(*) FROM outflow.outflow_mark a WHERE a.name = claim.name
      AND a.partition = open.partition)) o;
  IF taken IS NULL THEN
    RETURN;
  END IF;
  UPDATE outflow.outflow_consumer t SET epoch = t.epoch + 1 WHERE t.name = claim.name RETURNING t.epoch INTO e;
  RETURN QUERY UPDATE outflow.outflow_mark t SET owner = claim.instance, epoch = e
    WHERE t.name = claim.name AND t.partition = ANY (taken)
    RETURNING t.source, t.partition, c.partitions, t.epoch, t.seq, c.barrier, t.due, t.n, t.holed;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.renew(name text, instance text, lease interval) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Stays a member. True: the shares or the layout have changed, so finish what runs and claim again.
DECLARE
  has bigint;
  quota bigint;
  free bigint;
BEGIN
  PERFORM outflow.bound('5s');
  UPDATE outflow.outflow_member t SET expires = clock_timestamp() + renew.lease
    WHERE t.name = renew.name AND t.instance = renew.instance;
  IF NOT FOUND THEN
    RETURN true;
  END IF;
  SELECT c.partitions / count(*) + CASE WHEN count(*) FILTER (WHERE (t.joined, t.instance) < (me.joined,
      me.instance)) < c.partitions % count(*) THEN 1 ELSE 0 END INTO quota
    FROM outflow.outflow_consumer c, outflow.outflow_member t, outflow.outflow_member me
    WHERE c.name = renew.name AND t.name = renew.name AND me.name = renew.name
      AND me.instance = renew.instance AND t.expires > clock_timestamp() GROUP BY c.partitions;
  SELECT count(*) FILTER (WHERE t.owner = renew.instance), count(*) FILTER (WHERE NOT EXISTS (
      SELECT FROM outflow.outflow_member m WHERE m.name = renew.name AND m.instance = t.owner
        AND m.expires > clock_timestamp())) INTO has, free
    FROM outflow.outflow_mark t WHERE t.name = renew.name AND t.source = 'live';
  RETURN has > quota OR has < quota AND free > 0
    OR EXISTS (SELECT FROM outflow.outflow_consumer c WHERE c.name = renew.name AND c.barrier IS NOT NULL);
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.leave(name text, instance text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Gives all partitions of an instance back: what belongs to nobody who is a member is free.
BEGIN
  PERFORM outflow.bound('5s');
  DELETE FROM outflow.outflow_member t WHERE t.name = leave.name AND t.instance = leave.instance;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.fence(name text, partition int, epoch bigint, seq bigint,
  source text DEFAULT 'live') RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Locks a mark until the transaction ends. OF001: it is not this claim's any more, or not there.
BEGIN
  PERFORM outflow.bound('35s');
  PERFORM FROM outflow.outflow_mark t WHERE t.name = fence.name AND t.source = fence.source
    AND t.partition = fence.partition AND t.epoch = fence.epoch AND t.seq = fence.seq FOR UPDATE;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'OF001',
      MESSAGE = format('outflow.fence: the mark of consumer %s, %s partition %s, is not at %s under epoch %s',
        fence.name, fence.source, fence.partition, fence.seq, fence.epoch),
      HINT = 'Somebody else has claimed the partition: roll back, forget what was read, and claim again.';
  END IF;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.advance(name text, partition int, epoch bigint, from_seq bigint,
  to_seq bigint, header text, source text DEFAULT 'live') RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Moves a mark to a message, whose header Outflow is given, in the transaction of its effect. OF001: another
-- claim. OF002: beyond the barrier. OF003: the broker lost its end, or the database has moved.
DECLARE
  m record;
  f text[] := regexp_match(advance.header,
    '^v=1 lsn=([0-9A-F]{1,8}/[0-9A-F]{1,8}) i=(\d{1,10}) n=(\d{1,10}) of=\d+ due=([0-9A-F]{1,8}/[0-9A-F]{1,8}) ');
  place bigint;
  barrier bigint;
BEGIN
  PERFORM outflow.fence(advance.name, advance.partition, advance.epoch, advance.from_seq, advance.source);
  IF f IS NULL OR (advance.to_seq > advance.from_seq) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
      MESSAGE = format('outflow.advance: from %s to %s, header %s', advance.from_seq, advance.to_seq,
        coalesce(quote_literal(left(advance.header, 100)), 'NULL')),
      HINT = 'Give the sequence of a later message, and its header Outflow of version 1.';
  END IF;
  place := CASE WHEN f[2]::bigint >= 1073741824 THEN f[2] ELSE f[3] END; -- a repair's events count by index
  SELECT t.barrier INTO barrier FROM outflow.outflow_consumer t WHERE t.name = advance.name;
  IF advance.source = 'live' AND advance.to_seq > barrier THEN
    RAISE EXCEPTION USING ERRCODE = 'OF002',
      MESSAGE = format('outflow.advance: %s is beyond the barrier %s', advance.to_seq, barrier),
      HINT = 'Another layout begins there: do what is before it, then claim again.';
  END IF;
  SELECT * INTO m FROM outflow.outflow_mark t WHERE t.name = advance.name AND t.source = advance.source
    AND t.partition = advance.partition;
  IF advance.source = 'live' AND (m.holed OR (m.due, m.n) >= (f[4]::pg_lsn, place)
    AND (m.due <> '0/0' OR m.lsn <> '0/0')) THEN
    RAISE EXCEPTION USING ERRCODE = 'OF003',
      MESSAGE = format('outflow.advance: message %s, (%s, %s), is not behind the mark %s, (%s, %s)%s',
        advance.to_seq, f[4], place, m.seq, m.due, m.n, CASE WHEN m.holed THEN ', whose message is lost'
        ELSE '' END),
      HINT = 'The broker lost its end, or the database moved to another cluster: an instance of package '
        'consumer can tell the two apart, and goes on.';
  END IF;
  UPDATE outflow.outflow_mark t SET seq = advance.to_seq, due = f[4]::pg_lsn, n = place, lsn = f[1]::pg_lsn,
    i = f[2]::bigint, updated_at = now() WHERE t.name = advance.name AND t.source = advance.source
    AND t.partition = advance.partition;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.lost(name text, partition int, epoch bigint, seq bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Stores that the stream does not have the mark's message any more, while older ones are there.
BEGIN
  PERFORM outflow.fence(lost.name, lost.partition, lost.epoch, lost.seq);
  UPDATE outflow.outflow_mark t SET holed = true WHERE t.name = lost.name AND t.source = 'live'
    AND t.partition = lost.partition;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.parked(name text, document text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Whether events of a document are parked: then its later ones have to be, too. Ask after outflow.advance or
-- outflow.fence, which lock the mark: nobody else parks or releases then.
BEGIN
  RETURN EXISTS (SELECT FROM outflow.outflow_parked t WHERE t.name = parked.name
    AND t.document = parked.document);
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.park(name text, seq bigint, document text, subject text, headers jsonb,
  data bytea, published_at timestamptz, event_id text, error text, attempts int) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Parks a live event, in the transaction that advances over it. error NULL: an earlier one of its document is
-- parked. headers: {"name": ["value"]}.
DECLARE
  f text[] := regexp_match(park.headers #>> '{Outflow,0}', '^v=1 lsn=([0-9A-F/]+) i=(\d+) ');
BEGIN
  IF f IS NULL OR octet_length(park.document) > 1000 THEN
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
      MESSAGE = format('outflow.park: message %s: it has no header Outflow of version 1, or its document has '
        'more than 1000 bytes', park.seq);
  END IF;
  INSERT INTO outflow.outflow_parked (name, document, hash, source, seq, subject, headers, data, published_at,
      position, event_id, cause, error, attempts)
    VALUES (park.name, park.document, outflow.hash(park.document), 'live', park.seq, park.subject,
      park.headers, park.data, park.published_at, f[1] || '-' || f[2], park.event_id,
      CASE WHEN park.error IS NULL THEN 'behind' ELSE 'poison' END, left(coalesce(park.error, ''), 2000),
      park.attempts)
    ON CONFLICT (name, source, seq, position) DO NOTHING;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.take(name text, partition int, epoch bigint, from_seq bigint, to_seq bigint,
  document text, subject text, headers jsonb, data bytea, published_at timestamptz, error text DEFAULT NULL,
  attempts int DEFAULT 0) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Moves a mark over an event. True: have its effects in this transaction. False: it is parked, because one of its
-- document is, or because error says how it has failed for good.
DECLARE
  behind boolean;
BEGIN
  PERFORM outflow.advance(take.name, take.partition, take.epoch, take.from_seq, take.to_seq,
    take.headers #>> '{Outflow,0}');
  behind := outflow.parked(take.name, take.document);
  IF behind OR take.error IS NOT NULL THEN
    PERFORM outflow.park(take.name, take.to_seq, take.document, take.subject, take.headers, take.data,
      take.published_at, substring(take.headers #>> '{Outflow,0}' from ' id=(\S*)'),
      CASE WHEN NOT behind THEN take.error END, take.attempts);
    RETURN false;
  END IF;
  RETURN true;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.released(name text, partition int, epoch bigint, at_seq bigint)
RETURNS TABLE (ord bigint, document text, skip boolean, attempts int, seq bigint, source text, subject text,
  headers jsonb, data bytea, published_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- The first event of a document that an operator has released, if there is one in the partition. Handle it
-- unless skip is set, and call outflow.unpark or outflow.repark, all in this transaction.
BEGIN
  PERFORM outflow.fence(released.name, released.partition, released.epoch, released.at_seq);
  RETURN QUERY SELECT t.ord, t.document, t.release = 'skip', t.attempts, t.seq, t.source, t.subject, t.headers,
      t.data, t.published_at
    FROM outflow.outflow_parked t, outflow.outflow_consumer c WHERE t.name = released.name
      AND c.name = released.name AND t.release <> '' AND t.hash % c.partitions = released.partition
      AND t.ord = (SELECT o.ord FROM outflow.outflow_parked o WHERE o.name = t.name AND o.document = t.document
        ORDER BY o.source DESC, o.ord LIMIT 1)
    ORDER BY t.ord LIMIT 1;
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.unpark(name text, ord bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Removes a released event that was handled or skipped. The next one of its document is released by that.
DECLARE
  d text;
BEGIN
  DELETE FROM outflow.outflow_parked t WHERE t.name = unpark.name AND t.ord = unpark.ord AND t.release <> ''
    RETURNING t.document INTO d;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'OF001',
      MESSAGE = format('outflow.unpark: row %s of consumer %s is not released', unpark.ord, unpark.name),
      HINT = 'Roll back, and call outflow.released again.';
  END IF;
  UPDATE outflow.outflow_parked t SET release = 'retry' WHERE t.release = '' AND t.ord = (
    SELECT o.ord FROM outflow.outflow_parked o WHERE o.name = unpark.name AND o.document = d
      ORDER BY o.source DESC, o.ord LIMIT 1);
END $outflow$;

CREATE OR REPLACE FUNCTION outflow.repark(name text, ord bigint, error text, attempts int) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $outflow$
#variable_conflict use_column
-- Parks a released event again that failed, once its effects are rolled back. attempts counts all of them.
BEGIN
  UPDATE outflow.outflow_parked t SET cause = 'poison', release = '', attempts = repark.attempts,
    error = left(coalesce(repark.error, ''), 2000) WHERE t.name = repark.name AND t.ord = repark.ord
    AND t.release <> '';
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'OF001',
      MESSAGE = format('outflow.repark: row %s of consumer %s is not released', repark.ord, repark.name),
      HINT = 'Roll back, and call outflow.released again.';
  END IF;
END $outflow$;
