import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Adds to the counter at a URL, twice under one key, reads it and deletes it. */
class JdkClient {
  private static final Pattern SHOWN = Pattern.compile("\"(replayed|count)\":(\\w+)");

  public static void main(String[] arguments) throws Exception {
    String counter = arguments[0];
    String body = "{\"delta\": 2}";
    for (int attempt = 0; attempt < 2; attempt++) {
      ask("POST", counter + "/add", "\"jdk\"", BodyPublishers.ofString(body));
    }
    ask("GET", counter + "?max_staleness=0s", null, BodyPublishers.noBody());
    ask("DELETE", counter, "\"jdk\"", BodyPublishers.noBody());
  }

  private static void ask(
      String method, String url, String key, HttpRequest.BodyPublisher body) throws Exception {
    HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(url)).method(method, body);
    if (key != null) {
      request.header("Content-Type", "application/json").header("Idempotency-Key", key);
    }
    // A client of its own asks for HTTP/2 in each request.
    HttpResponse<String> answer =
        HttpClient.newHttpClient().send(request.build(), BodyHandlers.ofString());
    Matcher found = SHOWN.matcher(answer.body());
    String shown = found.find() ? found.group(1) + "=" + found.group(2) : answer.body();
    System.out.println(
        method + " " + answer.version() + " " + answer.statusCode() + " " + shown);
  }
}
