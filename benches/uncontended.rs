//! One thread, a lock that nobody else wants: pairs of lock and unlock per second, beside the raw commands.
//!
//! With `LEASEHOLD_BENCH_BUSY=1`, it runs beside one busy loop per core.
//!
//! Criterion measures each way by itself. To compare the ways, read the table after it: it has many short rounds of all
//! ways in turn, so that other load on the machine affects all alike.

mod support;

use std::error::Error;
use std::time::{Duration, Instant};

use criterion::Criterion;
use leasehold::{Client, Mutex};
use leasehold_load::Raw;
use leasehold_testbed::Server;

const ROUNDS: usize = 60;
const ROUND: Duration = Duration::from_millis(50);
const WAYS: [&str; 3] = ["raw, both awaited", "guard dropped", "unlock()"];

fn pair(raw: &mut Raw) {
    assert!(raw.try_lock().expect("the server runs"));
    raw.unlock().expect("nobody else wants the lock");
}

fn dropped(mutex: &Mutex) {
    drop(mutex.lock().expect("nobody else wants the lock"));
}

fn unlocked(mutex: &Mutex) {
    let guard = mutex.lock().expect("nobody else wants the lock");
    guard.unlock().expect("the server runs");
}

/// Pairs per second over one round.
fn rate(mut pair: impl FnMut(), last: impl FnOnce()) -> f64 {
    let start = Instant::now();
    let mut pairs = 1;
    while start.elapsed() < ROUND {
        pair();
        pairs += 1;
    }
    last();
    f64::from(pairs) / start.elapsed().as_secs_f64()
}

/// One round of one of [`WAYS`]. At the end, it waits once for the releases of dropped guards, so a round includes all
/// work that it has started.
fn round(way: usize, raw: &mut Raw, mutex: &Mutex) -> f64 {
    match way {
        0 => {
            let pair = std::cell::RefCell::new(|| pair(raw));
            rate(|| pair.borrow_mut()(), || pair.borrow_mut()())
        }
        1 => rate(|| dropped(mutex), || unlocked(mutex)),
        _ => rate(|| unlocked(mutex), || unlocked(mutex)),
    }
}

/// Returns for each way the pairs per second of each round, and their ratios to the raw way in the same round.
fn compare(raw: &mut Raw, mutex: &Mutex) -> [(Vec<f64>, Vec<f64>); 3] {
    let mut results = [const { (Vec::new(), Vec::new()) }; 3];
    for turn in 0..ROUNDS {
        let mut rates = [0.0; 3];
        for place in 0..3 {
            let way = (turn + place) % 3;
            rates[way] = round(way, raw, mutex);
        }
        for (result, rate) in results.iter_mut().zip(rates) {
            result.0.push(rate);
            result.1.push(rate / rates[0]);
        }
    }
    results
}

/// First quartile, median, third quartile.
fn quartiles(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

fn print_comparison(title: &str, raw: &mut Raw, mutex: &Mutex) {
    let mut table = support::table([title, "pairs/s", "quartiles", "ratio to raw", "quartiles"]);
    for (way, (mut rates, mut ratios)) in WAYS.into_iter().zip(compare(raw, mutex)) {
        let [low, rate, high] = quartiles(&mut rates);
        let [least, ratio, most] = quartiles(&mut ratios);
        table.add_row([
            way.to_owned(),
            format!("{rate:.0}"),
            format!("{low:.0} - {high:.0}"),
            format!("{ratio:.2}"),
            format!("{least:.2} - {most:.2}"),
        ]);
    }
    println!("{table}\n");
}

fn main() -> Result<(), Box<dyn Error>> {
    let server = Server::start()?;
    let mut raw = Raw::new(&server.url(), "raw:lock", "1")?;
    let client = Client::open(server.url())?;
    let mutex = client.mutex("lock");

    let _loops = support::Busy::from_environment().start()?;
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("uncontended");
    group.bench_function("raw", |bencher| bencher.iter(|| pair(&mut raw)));
    group.bench_function("drop", |bencher| bencher.iter(|| dropped(&mutex)));
    group.bench_function("unlock", |bencher| bencher.iter(|| unlocked(&mutex)));
    group.finish();
    criterion.final_summary();

    // Criterion's own modes (--test, --list, --profile-time ..) print only their own results.
    if std::env::args().skip(1).ne(["--bench".to_owned()]) {
        return Ok(());
    }
    println!("{}", support::machine(&server)?);
    println!("median of {ROUNDS} rounds of {ROUND:?} of each way, in turn\n");
    print_comparison("free running", &mut raw, &mutex);
    match support::pin_to_one_core(server.pid())? {
        Some(core) => {
            let title = format!("client and server pinned to core {core}");
            print_comparison(&title, &mut raw, &mutex);
        }
        None => println!("this system cannot pin threads to a core"),
    }
    Ok(())
}
