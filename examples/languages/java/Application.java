import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.util.regex.Pattern;

/** The application: which document an event belongs to, and what it does: a hash over each document's events. */
class Application {
    /** Names what documentOf does: the marks count for it alone. */
    static final String KEYING = "outbox.{doc_id}";

    /** The document of the subject template outbox.{doc_id}: docs/format.md has the encoding. */
    static String documentOf(String subject) {
        String token = subject.split("\\.")[1];
        if (token.equals("=")) return "";
        return token.contains("=~") ? token : URLDecoder.decode(token.replace('=', '%'), StandardCharsets.UTF_8);
    }

    /** Has an event's effects, in the transaction that moves the mark. After an error it is tried again, then parked.
     *  @param outflow the header of that name */
    static void handle(Connection db, String document, String outflow, byte[] data) throws Exception {
        var key = Pattern.compile(" key=(\\S*)").matcher(outflow);
        String entry = (key.find() ? key.group(1) : "") + new String(data, StandardCharsets.UTF_8);
        try (var s = db.prepareStatement("INSERT INTO state VALUES (?, 1, md5(?)) ON CONFLICT (document) "
                + "DO UPDATE SET events = state.events + 1, hash = md5(state.hash || ?)")) {
            s.setString(1, document);
            s.setString(2, entry);
            s.setString(3, entry);
            s.executeUpdate();
        }
    }
}
