import com.amazonaws.services.dynamodbv2.local.main.ServerRunner;
import com.amazonaws.services.dynamodbv2.local.server.DynamoDBProxyServer;
import java.util.Arrays;
import org.eclipse.jetty.server.Connector;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.server.ServerConnector;

/** Amazon's local DynamoDB on one address: it has no option for that, and would take any. */
public class DynamodbOnLoopback {
    /** The address, then the arguments of DynamoDB. */
    public static void main(String[] given) throws Exception {
        String[] rest = Arrays.copyOfRange(given, 1, given.length);
        DynamoDBProxyServer proxy = ServerRunner.createServerFromCommandLineArgs(rest);
        var field = DynamoDBProxyServer.class.getDeclaredField("server");
        field.setAccessible(true);
        for (Connector each : ((Server) field.get(proxy)).getConnectors()) {
            ((ServerConnector) each).setHost(given[0]);
        }
        proxy.start();
        proxy.join();
    }
}
