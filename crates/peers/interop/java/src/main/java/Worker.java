import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.redisson.Redisson;
import org.redisson.api.RAtomicLong;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Redisson's locks for {@code cargo xtask interop}, used as its documentation shows. The protocol is that of
 * tools/interop/src/messages.rs: a line with the assignment, and then a line for each order. Each answer is a line that
 * begins with "@ ". Uses no JSON library, since the versions of Redisson need different ones.
 */
public final class Worker {
  private final RedissonClient client;
  private final Lock lock;
  private final String name;
  private final List<RLock> many = new ArrayList<>();

  /** Null without a lease time: the lock is then renewed. */
  private interface Lock {
    /** Returns the token, or 0 if the lock has none. */
    long lock(Long leaseMs);

    boolean tryLock();

    void unlock();
  }

  private static final class Plain implements Lock {
    private final RLock lock;

    Plain(RedissonClient client, String name) {
      lock = client.getLock(name);
    }

    @Override
    public long lock(Long leaseMs) {
      if (leaseMs == null) {
        lock.lock();
      } else {
        lock.lock(leaseMs, TimeUnit.MILLISECONDS);
      }
      return 0;
    }

    @Override
    public boolean tryLock() {
      return lock.tryLock();
    }

    @Override
    public void unlock() {
      lock.unlock();
    }
  }

  /** Older versions of Redisson lack this lock, so only this class names it. */
  private static final class Fenced implements Lock {
    private static final long TRY_MS = 100;
    private final RFencedLock lock;

    Fenced(RedissonClient client, String name) {
      lock = client.getFencedLock(name);
    }

    @Override
    public long lock(Long leaseMs) {
      if (leaseMs == null) {
        return lock.lockAndGetToken();
      }
      // Some versions of `lockAndGetToken` ignore the lease time.
      lock.lock(leaseMs, TimeUnit.MILLISECONDS);
      return lock.getToken();
    }

    @Override
    public boolean tryLock() {
      // Without a time, this call waits until it has the lock.
      return lock.tryLockAndGetToken(TRY_MS, -1, TimeUnit.MILLISECONDS) != null;
    }

    @Override
    public void unlock() {
      lock.unlock();
    }
  }

  private Worker(String assignment) {
    name = text(assignment, "name");
    Config config = new Config();
    config.setLockWatchdogTimeout(number(assignment, "watchdog_ms"));
    config.useSingleServer()
        .setAddress(text(assignment, "url"))
        .setConnectionPoolSize(8)
        .setConnectionMinimumIdleSize(2);
    client = Redisson.create(config);
    lock = text(assignment, "library").endsWith("fenced") ? new Fenced(client, name) : new Plain(client, name);
  }

  private String carryOut(String order) throws Exception {
    Long lease = number(order, "ttl_ms");
    switch (text(order, "do")) {
      case "grants":
        return grants(order);
      case "lock":
        lock.lock(lease);
        return done(true);
      case "try_lock":
        return done(lock.tryLock());
      case "unlock":
        return done(unlock());
      case "lock_many":
        for (long i = 0; i < number(order, "count"); i++) {
          RLock one = client.getLock(name + ":" + i);
          one.lock();
          many.add(one);
        }
        return done(true);
      case "unlock_many":
        many.forEach(RLock::unlock);
        many.clear();
        return done(true);
      default:
        throw new IllegalArgumentException(order);
    }
  }

  private boolean unlock() {
    try {
      lock.unlock();
      return true;
    } catch (IllegalMonitorStateException notHeld) {
      return false;
    }
  }

  private String grants(String order) throws Exception {
    long count = number(order, "count");
    long hold = number(order, "hold_ms");
    long pause = number(order, "pause_ms");
    boolean locked = order.contains("\"locked\":true");
    RAtomicLong inside = client.getAtomicLong("section:" + name + ":inside");
    RAtomicLong total = client.getAtomicLong("section:" + name + ":total");
    RAtomicLong last = client.getAtomicLong("section:" + name + ":token");
    int overlaps = 0;
    int stale = 0;
    long longest = 0;
    for (long grant = 0; grant < count; grant++) {
      long asked = System.nanoTime();
      long token = locked ? lock.lock(null) : 0;
      longest = Math.max(longest, System.nanoTime() - asked);
      if (inside.incrementAndGet() != 1) {
        overlaps++;
      }
      if (token != 0) {
        if (last.get() >= token) {
          stale++;
        }
        last.set(token);
      }
      long before = total.get();
      Thread.sleep(hold);
      total.set(before + 1);
      inside.decrementAndGet();
      if (locked) {
        lock.unlock();
      }
      TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextLong(pause * 1000 + 1));
    }
    return String.format(
        Locale.ROOT,
        "{\"grants\":%d,\"overlaps\":%d,\"stale_tokens\":%d,\"longest_wait_ms\":%.3f}",
        count,
        overlaps,
        stale,
        longest / 1e6);
  }

  private static String done(boolean done) {
    return "{\"done\":" + done + "}";
  }

  private static String text(String json, String field) {
    Matcher found = Pattern.compile("\"" + field + "\":\"([^\"]*)\"").matcher(json);
    if (!found.find()) {
      throw new IllegalArgumentException("no " + field + " in " + json);
    }
    return found.group(1);
  }

  /** Null if there is no such number. */
  private static Long number(String json, String field) {
    Matcher found = Pattern.compile("\"" + field + "\":(\\d+)").matcher(json);
    return found.find() ? Long.valueOf(found.group(1)) : null;
  }

  private static void say(String message) {
    System.out.println("@ " + message);
    System.out.flush();
  }

  public static void main(String[] arguments) {
    try {
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
      Worker worker = new Worker(input.readLine());
      BlockingQueue<String> orders = new LinkedBlockingQueue<>();
      Thread listener = new Thread(() -> listen(input, orders));
      listener.setDaemon(true);
      listener.start();
      say("{\"Ok\":{}}");
      while (true) {
        say("{\"Ok\":" + worker.carryOut(orders.take()) + "}");
      }
    } catch (Throwable error) {
      say("{\"Err\":\"" + error.toString().replaceAll("[^ -!#-\\[\\]-~]", " ") + "\"}");
      Runtime.getRuntime().halt(1);
    }
  }

  private static void listen(BufferedReader input, BlockingQueue<String> orders) {
    try {
      for (String line = input.readLine(); line != null; line = input.readLine()) {
        orders.add(line);
      }
    } catch (java.io.IOException unreadable) {
      // The same as the end of the input.
    }
    // The program that gave the orders has ended.
    Runtime.getRuntime().halt(1);
  }
}
