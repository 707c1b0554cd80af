//! Locks while other threads keep all cores of the machine busy.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::Server;

use crate::steady::handing_off;
use crate::support::{server, warm_up};

const THREADS: usize = 16;
/// The length of each measurement.
const WINDOW: Duration = Duration::from_millis(300);
/// How often both ways are measured at most, since this is a race of two programs on a busy machine.
const TRIES: usize = 5;

/// Runs `turn` on `threads` threads for [`WINDOW`], and returns the number of turns.
fn count_turns(threads: usize, turn: impl Fn() + Sync) -> u64 {
    let turns = AtomicU64::new(0);
    let end = Instant::now() + WINDOW;
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while Instant::now() < end {
                    turn();
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    turns.into_inner()
}

/// The pairs of one thread that sends `SET NX PX` and a deleting script, and waits for both replies.
fn raw_pairs(server: &Server) -> u64 {
    const RELEASE: &str =
        "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end";
    let client = redis::Client::open(server.url()).unwrap();
    let connection = std::sync::Mutex::new(client.get_connection().unwrap());
    let release = redis::Script::new(RELEASE);
    count_turns(1, || {
        let mut connection = connection.lock().unwrap();
        let mut set = redis::cmd("SET");
        set.arg("raw").arg("own").arg("NX").arg("PX").arg(30_000);
        let () = set.query(&mut *connection).unwrap();
        let () = release
            .key("raw")
            .arg("own")
            .invoke(&mut *connection)
            .unwrap();
    })
}

/// Threads that keep all cores busy until this is dropped.
struct BusyCores(Arc<AtomicBool>, Vec<thread::JoinHandle<()>>);

impl BusyCores {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().unwrap().get();
        let threads = (0..cores).map(|_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    black_box(());
                }
            })
        });
        let threads = threads.collect();
        Self(stop, threads)
    }
}

impl Drop for BusyCores {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A hand-off needs no round trip. A thread that yields while it waits gives each busy thread a time slice of 3 to 4
/// ms, and then a hand-off takes longer than the round trips of the raw commands.
#[test]
fn hand_offs_beside_busy_threads_are_faster_than_raw_commands() {
    let server = server();
    let client = handing_off(&server);
    warm_up(&client);
    let _busy = BusyCores::start();
    let mut measured = Vec::new();
    for _ in 0..TRIES {
        let raw = raw_pairs(&server);
        let own = count_turns(THREADS, || client.with_lock("k", || ()).unwrap());
        measured.push((own, raw));
        if own > raw {
            return;
        }
    }
    panic!("turns of our locks and of raw commands: {measured:?}");
}
