import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RFuture;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * A load process with shared locks of Redisson, used as its documentation shows. The protocol is that of
 * tools/bench/src/shares/load.rs: a line with the assignment, and then a line for each round. Each answer is a line that
 * begins with "@ ".
 */
public final class Peer {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final long LEASE_SECONDS = 30;
  /** How long a wait for several locks may outlast its round: the locks of many threads may be acquired and given back
   * for minutes before one thread has all of its locks. */
  private static final long PATIENCE_NANOS = 10_000_000_000L;
  /** Redisson knows a holder by its client and the number of its thread. */
  private static final long FIRST_OTHER_THREAD = 1_000_000;

  public static void main(String[] arguments) {
    try {
      serve();
      System.exit(0);
    } catch (Throwable error) {
      System.out.println("@ {\"Err\":\"" + error.toString().replaceAll("[^ -!#-\\[\\]-~]", " ") + "\"}");
      System.exit(1);
    }
  }

  private static void serve() throws Exception {
    BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
    JsonNode assignment = JSON.readTree(input.readLine());
    int threads = assignment.get("threads").asInt();
    JsonNode mix = assignment.get("mix");
    long hold = nanos(assignment.get("hold"));
    Config config = new Config();
    config.useSingleServer()
        .setAddress(assignment.get("url").asText())
        .setConnectionPoolSize(Math.max(64, threads))
        .setConnectionMinimumIdleSize(Math.min(16, threads));
    RedissonClient client = Redisson.create(config);
    String key = "shared-redisson";
    RReadWriteLock both = client.getReadWriteLock(key);
    if (assignment.get("process").asInt() == 0) {
      addReaders(both.readLock(), assignment.get("others").asInt());
    }
    RPermitExpirableSemaphore semaphore = client.getPermitExpirableSemaphore(key + "-permits");
    for (String kind : new String[] {"first", "second"}) {
      if (mix.get(kind).has("Permits")) {
        semaphore.trySetPermits(mix.get(kind).get("Permits").get("limit").asInt());
      }
    }
    int first = assignment.get("process").asInt() * threads;
    List<Seat> seats = new ArrayList<>();
    for (int thread = 0; thread < threads; thread++) {
      seats.add(new Seat(client, both, semaphore, mix, hold, first + thread));
    }
    ExecutorService pool = Executors.newFixedThreadPool(threads);
    say(List.of(tally(), tally()));
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      JsonNode round = JSON.readTree(line);
      long start = round.get("start").asLong();
      long end = start + nanos(round.get("window"));
      long before = ownCpu();
      List<Callable<Void>> work = new ArrayList<>();
      for (Seat seat : seats) {
        work.add(() -> seat.run(start, end));
      }
      for (Future<Void> ended : pool.invokeAll(work)) {
        ended.get();
      }
      List<Map<String, Object>> tallies = new ArrayList<>();
      for (int kind = 0; kind < 2; kind++) {
        tallies.add(sum(seats, kind));
      }
      tallies.get(0).put("cpu", duration(ownCpu() - before));
      say(tallies);
    }
  }

  private static void addReaders(RLock lock, int count) throws Exception {
    List<RFuture<Void>> running = new ArrayList<>();
    for (int other = 0; other < count; other++) {
      running.add(lock.lockAsync(3600, TimeUnit.SECONDS, FIRST_OTHER_THREAD + other));
      if (running.size() == 100 || other + 1 == count) {
        for (RFuture<Void> one : running) {
          one.toCompletableFuture().get();
        }
        running.clear();
      }
    }
  }

  /** A thread, and what it did in a round. */
  private static final class Seat {
    final RedissonClient client;
    final RReadWriteLock both;
    final RPermitExpirableSemaphore semaphore;
    final JsonNode[] kinds;
    final int secondPercent;
    final long hold;
    final SplittableRandom random;
    final long[] pairs = new long[2];
    final long[] inTime = new long[2];
    final List<Map<Long, Long>> waits = List.of(new HashMap<>(), new HashMap<>());

    Seat(
        RedissonClient client,
        RReadWriteLock both,
        RPermitExpirableSemaphore semaphore,
        JsonNode mix,
        long hold,
        int number) {
      this.client = client;
      this.both = both;
      this.semaphore = semaphore;
      this.kinds = new JsonNode[] {mix.get("first"), mix.get("second")};
      this.secondPercent = mix.get("second_percent").asInt();
      this.hold = hold;
      this.random = new SplittableRandom(number);
    }

    Void run(long start, long end) throws Exception {
      for (int kind = 0; kind < 2; kind++) {
        pairs[kind] = 0;
        inTime[kind] = 0;
        waits.get(kind).clear();
      }
      pause(start - System.nanoTime());
      for (long asked = System.nanoTime(); asked < end; asked = System.nanoTime()) {
        int kind = random.nextInt(100) < secondPercent ? 1 : 0;
        long limit = end + PATIENCE_NANOS;
        long taken = pair(kinds[kind], limit);
        if (taken < limit) {
          pairs[kind]++;
        }
        if (taken < end) {
          inTime[kind]++;
        }
        waits.get(kind).merge(rounded(taken - asked), 1L, Long::sum);
      }
      return null;
    }

    /** Returns the time of the grant, or of the end of the wait for several locks, which lasts until `limit`. */
    private long pair(JsonNode kind, long limit) throws Exception {
      if (kind.has("Keys")) {
        RLock all = client.getMultiLock(choose(kind.get("Keys")));
        if (!all.tryLock(limit - System.nanoTime(), TimeUnit.NANOSECONDS)) {
          return System.nanoTime();
        }
        long taken = System.nanoTime();
        pause(hold);
        all.unlock();
        return taken;
      }
      if (kind.has("Permits")) {
        int weight = kind.get("Permits").get("weight").asInt();
        if (weight == 1) {
          String permit = semaphore.acquire(LEASE_SECONDS, TimeUnit.SECONDS);
          long taken = System.nanoTime();
          pause(hold);
          semaphore.release(permit);
          return taken;
        }
        List<String> permits = semaphore.acquire(weight, LEASE_SECONDS, TimeUnit.SECONDS);
        long taken = System.nanoTime();
        pause(hold);
        semaphore.release(permits);
        return taken;
      }
      RLock lock = kind.asText().equals("Read") ? both.readLock() : both.writeLock();
      lock.lock();
      long taken = System.nanoTime();
      pause(hold);
      lock.unlock();
      return taken;
    }

    /** The locks of a random choice of keys. */
    private RLock[] choose(JsonNode keys) {
      int of = keys.get("of").asInt();
      RLock[] chosen = new RLock[keys.get("count").asInt()];
      int[] places = new int[of];
      for (int place = 0; place < of; place++) {
        places[place] = place;
      }
      for (int place = 0; place < chosen.length; place++) {
        int other = place + random.nextInt(of - place);
        int drawn = places[other];
        places[other] = places[place];
        places[place] = drawn;
        chosen[place] = client.getLock("shared-redisson-" + drawn);
      }
      return chosen;
    }
  }

  private static void pause(long nanos) throws InterruptedException {
    if (nanos > 0) {
      TimeUnit.NANOSECONDS.sleep(nanos);
    }
  }

  /** Keeps three digits. */
  private static long rounded(long nanos) {
    long step = 1;
    while (nanos / step >= 1000) {
      step *= 10;
    }
    return nanos / step * step;
  }

  private static Map<String, Object> tally() {
    Map<String, Object> tally = new HashMap<>();
    for (String name : new String[] {"pairs", "in_time", "left_out", "least", "most"}) {
      tally.put(name, 0);
    }
    tally.put("waits", List.of());
    tally.put("cpu", duration(0));
    return tally;
  }

  private static Map<String, Object> sum(List<Seat> seats, int kind) {
    long pairs = 0;
    long inTime = 0;
    Map<Long, Long> waits = new HashMap<>();
    for (Seat seat : seats) {
      pairs += seat.pairs[kind];
      inTime += seat.inTime[kind];
      seat.waits.get(kind).forEach((wait, count) -> waits.merge(wait, count, Long::sum));
    }
    List<long[]> steps = new ArrayList<>();
    waits.forEach((wait, count) -> steps.add(new long[] {wait, count}));
    Map<String, Object> tally = tally();
    tally.put("pairs", pairs);
    tally.put("in_time", inTime);
    tally.put("waits", steps);
    return tally;
  }

  private static long nanos(JsonNode duration) {
    return duration.get("secs").asLong() * 1_000_000_000 + duration.get("nanos").asLong();
  }

  private static Map<String, Long> duration(long nanos) {
    return Map.of("secs", nanos / 1_000_000_000, "nanos", nanos % 1_000_000_000);
  }

  /** The CPU time that this process has used, in ns. */
  private static long ownCpu() {
    var system = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    return system.getProcessCpuTime();
  }

  private static void say(Object message) throws Exception {
    System.out.println("@ " + JSON.writeValueAsString(Map.of("Ok", message)));
    System.out.flush();
  }
}
