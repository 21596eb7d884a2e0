import io.nats.client.*;
import io.nats.client.api.*;
import java.nio.charset.StandardCharsets;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.util.*;

/** A complete consumer: each event has its effect once and in order, through any crash, and any number of instances
 *  share the work. docs/consume-any-language.md explains each step. */
class Consumer {
    static final Map<String, String> env = System.getenv();
    static final String NAME = env.getOrDefault("NAME", "notes"), STREAM = env.getOrDefault("STREAM", "OUTBOX"),
        LEASE = env.getOrDefault("LEASE", "10 s"), INSTANCE = env.getOrDefault("INSTANCE", NUID.nextGlobal());
    static final int PARTITIONS = Integer.parseInt(env.getOrDefault("PARTITIONS", "16"));
    static volatile boolean stopping, begun, refused;
    static java.sql.Connection db;
    static long due;
    interface Work { String run(int tries, String failure) throws Exception; } // returns how the handler has failed

    static List<Map<String, Object>> sql(String call, Object... args) throws SQLException {
        try (var s = db.prepareStatement("SELECT * FROM outflow." + call)) {
            s.setString(1, NAME);
            for (int i = 0; i < args.length; i++) s.setObject(i + 2, args[i]);
            var rows = s.executeQuery();
            var all = new ArrayList<Map<String, Object>>();
            while (rows.next()) {
                all.add(new HashMap<>());
                for (int i = 1; i <= rows.getMetaData().getColumnCount(); i++)
                    all.get(all.size() - 1).put(rows.getMetaData().getColumnName(i), rows.getObject(i));
            }
            return all;
        }
    }

    /** Commits the work, again and again as long as the handler fails: for good after 5 times where the database
     *  refuses the data, and after a quarter of an hour otherwise, as what it needs may be down. */
    static void attempt(Work work) throws Exception {
        String failure = null;
        for (int tries = 0; ; tries++) {
            db.setAutoCommit(false);
            failure = work.run(tries, failure);
            if (failure == null) db.commit(); else db.rollback();
            db.setAutoCommit(true);
            if (failure == null) return;
            Thread.sleep(Math.min(50L << Math.min(tries, 5), 1000));
            if (stopping || renewal()) throw new IllegalStateException("it claims again while an event fails: " + failure);
        }
    }

    static String effects(String document, String outflow, byte[] data) {
        try { Application.handle(db, document, outflow, data); return null; } catch (Exception e) {
            refused = e instanceof SQLException s && String.valueOf(s.getSQLState()).matches("2[23].*");
            return e.toString();
        }
    }

    static boolean renewal() throws SQLException { // true: the shares have changed
        if (System.nanoTime() < due) return false;
        due = System.nanoTime() + 500_000_000;
        return (boolean) sql("renew(?, ?, ?::interval)", INSTANCE, LEASE).get(0).get("renew");
    }

    static long hash(String s) {
        long h = 2166136261L;
        for (byte b : s.getBytes(StandardCharsets.UTF_8)) h = (h ^ (b & 255)) * 16777619 & 0xFFFFFFFFL;
        return h;
    }
    static long of(Map<String, Object> row, String column) { return ((Number) row.get(column)).longValue(); }

    static void session(Connection nc) throws Exception { // claims partitions, and reads until the shares change
        var jsm = nc.jetStreamManagement();
        var info = jsm.getStreamInfo(STREAM);
        long first = info.getStreamState().getFirstSequence(), end = info.getStreamState().getLastSequence();
        var created = info.getCreateTime().toOffsetDateTime();
        if (!begun) sql("start(?, ?, ?, '{>}', ?, ?)", STREAM, created, Application.KEYING, PARTITIONS);
        begun = true; // one that is deleted later does not begin anew by itself
        var marks = sql("claim(?, ?, ?, ?::interval) WHERE source = 'live'", INSTANCE, Application.KEYING, LEASE);
        long from = marks.stream().mapToLong(m -> of(m, "seq")).min().orElse(Long.MAX_VALUE);
        long until = marks.stream().map(m -> m.get("barrier")).filter(Objects::nonNull).mapToLong(b -> (long) b)
            .findFirst().orElse(Long.MAX_VALUE);
        if (from >= until) { Thread.sleep(200); return; } // others have all partitions, or must come to the barrier
        if (from + 1 < first) throw new SQLException("messages from " + (from + 1) + " were removed unread", "OF004");
        for (var m : marks) {
            if (of(m, "seq") < Math.max(first, 1) || of(m, "seq") > end) continue;
            try { jsm.getMessage(STREAM, of(m, "seq")); }
            catch (JetStreamApiException e) { // take refuses what comes then
                if (e.getApiErrorCode() != 10037) throw e;
                sql("lost(?, ?, ?, ?)", m.get("partition"), m.get("epoch"), m.get("seq"));
            }
        }
        var start = new OrderedConsumerConfiguration().deliverPolicy(DeliverPolicy.ByStartSequence).startSequence(from + 1);
        try (var messages = nc.getStreamContext(STREAM).createOrderedConsumer(start).iterate()) {
            long last = 0, tidied = 0;
            String head = "";
            for (boolean more = true; more; ) {
                var msg = messages.nextMessage(1000);
                long seq = msg == null ? 0 : msg.metaData().streamSequence();
                more = !stopping && seq <= until && !renewal();
                if (msg != null && more && !msg.getHeaders().containsKey("Outflow-Cut")) { // a cut is no event
                    last = seq;
                    var outflow = head = msg.getHeaders().getFirst("Outflow");
                    var document = Application.documentOf(msg.getSubject());
                    for (var m : marks) {
                        if (hash(document) % of(m, "partitions") != of(m, "partition") || of(m, "seq") >= seq
                            || msg.getHeaders().containsKey("Outflow-Dead-Letter")) continue;
                        var names = msg.getHeaders().keySet().toArray(String[]::new);
                        var values = Arrays.stream(names).map(n -> msg.getHeaders().getFirst(n)).toArray(String[]::new);
                        attempt((tries, failure) -> (boolean) sql("take(?, ?, ?, ?, ?, ?, ?, (SELECT jsonb_object_agg(k, "
                            + "jsonb_build_array(v)) FROM unnest(?::text[], ?::text[]) AS h(k, v)), ?, ?, ?, ?)",
                            m.get("partition"), m.get("epoch"), m.get("seq"), seq, document, msg.getSubject(), names, values,
                            msg.getData(), msg.metaData().timestamp().toOffsetDateTime(), tries < (refused ? 5 : 900) ? null : failure, tries)
                            .get(0).get("take") ? effects(document, outflow, msg.getData()) : null);
                        m.put("seq", seq);
                    }
                }
                if (more && System.nanoTime() < tidied + 1_000_000_000L) continue;
                tidied = System.nanoTime();
                if (!jsm.getStreamInfo(STREAM).getCreateTime().toOffsetDateTime().equals(created))
                    throw new IllegalStateException("the stream was made anew");
                for (var m : marks) {
                    attempt((tries, failure) -> { // parked, and released by an operator
                        for (var e : sql("released(?, ?, ?, ?) AS r, LATERAL (SELECT headers #>> '{Outflow,0}' AS outflow) AS h",
                                m.get("partition"), m.get("epoch"), m.get("seq"))) {
                            if (tries > 0) { sql("repark(?, ?, ?, ?)", e.get("ord"), failure, of(e, "attempts") + 1); return null; }
                            var failed = (boolean) e.get("skip") ? null
                                : effects((String) e.get("document"), (String) e.get("outflow"), (byte[]) e.get("data"));
                            if (failed != null) return failed;
                            sql("unpark(?, ?)", e.get("ord"));
                        }
                        return null;
                    });
                    if (of(m, "seq") >= last) continue; // else nothing was for this partition
                    sql("advance(?, ?, ?, ?, ?, ?)", m.get("partition"), m.get("epoch"), m.get("seq"), last, head);
                    m.put("seq", last);
                }
            }
        }
    }

    public static void main(String[] args) throws Exception {
        var main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            stopping = true;
            try { main.join(5000); } catch (InterruptedException e) { }
        }));
        var nc = Nats.connect(new Options.Builder().server(env.get("NATS_URL")).maxReconnects(-1).build());
        while (!stopping) {
            try (var connection = DriverManager.getConnection(env.get("JDBC_URL"))) {
                db = connection;
                while (!stopping) session(nc);
                sql("leave(?, ?)", INSTANCE);
            } catch (Exception e) {
                System.err.println(e.getMessage());
                if (e instanceof SQLException s && Set.of("OF003", "OF004").contains(String.valueOf(s.getSQLState())))
                    Runtime.getRuntime().halt(1); // a person has to decide
                Thread.sleep(500); // another session finds out what has happened
            }
        }
        nc.close();
        Runtime.getRuntime().halt(0); // else a signal that ended it cleanly would be its exit code
    }
}
