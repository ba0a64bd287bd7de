import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

/**
 * Posts each line of standard input, a path and JSON with a space between, to the server at the
 * first argument: once with a length, once in chunks. Prints the status and the body of each
 * reply. Java's client offers HTTP/2 in each request, unless it is told not to.
 */
class Post {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var lines = new BufferedReader(new InputStreamReader(System.in));
        for (var line = lines.readLine(); line != null; line = lines.readLine()) {
            var parts = line.split(" ", 2);
            var body = parts[1].getBytes();
            for (var publisher : new HttpRequest.BodyPublisher[] {
                BodyPublishers.ofByteArray(body),
                BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body)),
            }) {
                var request = HttpRequest.newBuilder(URI.create(arguments[0] + parts[0]))
                    .header("content-type", "application/json").POST(publisher).build();
                var reply = client.send(request, BodyHandlers.ofString());
                System.out.println(reply.statusCode() + " " + reply.body());
            }
        }
    }
}
