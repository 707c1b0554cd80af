//! Requests under lease ids that do not hold the lock: they change nothing.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use leasehold_testbed::Server;
use redis::{Connection, Value};

use super::{
    ACQUIRE, ADOPT, FENCE, RELEASE, RENEW, Said, TTL, call, connect, counter_of, ends, eval,
    holder, queue_name, release, text_of,
};
use crate::support::{ask, server};

/// The number of generated attempts, and the number of attempts between two checks.
const ATTEMPTS: usize = 100_000;
const BATCH: usize = 1_000;
/// The number of locks; every second lock has a queue.
const KEYS: usize = 40;

/// Random numbers from a seed: SplitMix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A lease id with at least one letter.
    fn lease(&mut self) -> String {
        let id = format!("{:016x}{:016x}", self.next(), self.next());
        format!("{}f", &id[1..])
    }
}

/// A lock with all its former holders and waiters.
struct Lock {
    key: String,
    holder: String,
    /// The time of the grant: the upper part of its token.
    micros: String,
    /// Two former holders: one released the lock, the other made a ticket.
    former: [String; 2],
    queue: Vec<String>,
}

impl Lock {
    fn make(redis: &mut Connection, numbers: &mut Numbers, n: usize) -> Self {
        let key = format!("k{n}");
        let [first, ticket, owner] = [(); 3].map(|()| numbers.lease());
        let mut acquire_as = |lease: &str, mode: &str| {
            let args = [&*holder(numbers.below(9)), lease, "900000", mode];
            call(redis, &ACQUIRE, &[FENCE, &key], &args).remove(0)
        };
        acquire_as(&first, "");
        assert_eq!(ends(&release(redis, &[&key], &[&first])), ["done"]);
        let mut acquire_as = |lease: &str, mode: &str| {
            let args = [&*holder(n % 9), lease, "900000", mode];
            call(redis, &ACQUIRE, &[FENCE, &key], &args).remove(0)
        };
        let Said::Text(micros) = acquire_as(&ticket, "") else {
            panic!("the lock is free");
        };
        let queue: Vec<String> = (0..n % 2 * 4).map(|_| numbers.lease()).collect();
        for (lease, mode) in queue.iter().zip(["0", "+", "+", "0"]) {
            assert!(matches!(acquire_as(lease, mode), Said::Queued { .. }));
        }
        let args = [&*holder(1), &ticket, &micros, &owner, ""];
        let said = call(redis, &ADOPT, &[&key], &args);
        assert!(matches!(said[0], Said::Adopted { .. }), "{said:?}");
        Self {
            key,
            holder: owner,
            micros,
            former: [first, ticket],
            queue,
        }
    }
}

/// A lease id that is neither that of the holder of `lock` nor that of a waiter, since waiters may leave the queue.
fn not_its_own(numbers: &mut Numbers, locks: &[Lock], lock: &Lock) -> String {
    let own = &lock.holder;
    let at = numbers.below(own.len());
    let id = match numbers.below(8) {
        0 => numbers.lease(),
        1 => {
            let digit = *numbers.one_of(b"0123456789abcdefABCDEF gz.-%") as char;
            format!("{}{digit}{}", &own[..at], &own[at + 1..])
        }
        2 => own[..at].to_owned(),
        3 => format!("{own}{}", numbers.below(10)),
        4 => own.to_uppercase(),
        5 => numbers.one_of(&lock.former).clone(),
        6 => numbers.one_of(locks).holder.clone(),
        _ => {
            let other = numbers.one_of(locks);
            let theirs = other.queue.iter().chain(&other.former).collect::<Vec<_>>();
            (*numbers.one_of(&theirs)).clone()
        }
    };
    if id == *own || lock.queue.contains(&id) {
        return numbers.lease();
    }
    id
}

/// One script call with up to four attempts of one kind.
fn attempt(numbers: &mut Numbers, locks: &[Lock]) -> (redis::Cmd, usize) {
    let n = 1 + numbers.below(4);
    let kind = numbers.below(4);
    let (mut keys, mut args) = (Vec::new(), Vec::new());
    let script: &str = match kind {
        0 | 1 => &RELEASE,
        2 => &RENEW,
        _ => &ADOPT,
    };
    if script == *RELEASE {
        keys.push(FENCE.to_owned());
    }
    if *script == **ADOPT {
        args.push(holder(numbers.below(9)));
    }
    for _ in 0..n {
        let lock = numbers.one_of(locks);
        let mut id = not_its_own(numbers, locks, lock);
        // A waiter is not the holder, either.
        if !lock.queue.is_empty() && numbers.below(4) == 0 {
            id = numbers.one_of(&lock.queue).clone();
        }
        let ttl = (*numbers.one_of(&["", "1", TTL, "86400000"])).to_owned();
        keys.push(lock.key.clone());
        match kind {
            // The lease may be queued, but for another client.
            0 if numbers.below(2) == 0 => args.push(format!("{id},900000,{}", holder(9))),
            0 => args.push(id),
            1 => args.push(format!("{id}!{}", holder(8))),
            2 => args.extend([id, if ttl.is_empty() { TTL.to_owned() } else { ttl }]),
            _ if numbers.below(8) == 0 => {
                // The holder's lease id, under a token that was not granted yet.
                let token = "9007199254740992".to_owned();
                args.extend([lock.holder.clone(), token, numbers.lease(), ttl]);
            }
            _ => args.extend([id, lock.micros.clone(), numbers.lease(), ttl]),
        }
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    (eval(script, &keys, &args), n)
}

/// All values with their queues, and all ttls in ms.
fn seen(redis: &mut Connection, locks: &[Lock]) -> (Vec<Value>, Vec<i64>) {
    let mut look = redis::pipe();
    for lock in locks {
        look.cmd("GET").arg(&lock.key);
        let queue = queue_name(&lock.key);
        look.cmd("ZRANGE")
            .arg(queue)
            .arg(&["0", "-1", "WITHSCORES"]);
    }
    let values = look.query(redis).unwrap();
    let mut look = redis::pipe();
    for lock in locks {
        look.cmd("PTTL").arg(&lock.key);
    }
    (values, look.query(redis).unwrap())
}

fn assert_refused(value: &Value, seed: u64) {
    match value {
        Value::BulkString(found) => assert!(found.starts_with(b"lh1 "), "seed {seed}: {found:?}"),
        Value::Array(values) => values.iter().for_each(|value| assert_refused(value, seed)),
        other => panic!("seed {seed}: the attempt succeeded: {other:?}"),
    }
}

#[test]
fn requests_under_other_leases_change_nothing() {
    let seed = std::env::var("LEASEHOLD_IT_SEED").map_or_else(
        |_| {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64
        },
        |seed| seed.parse().expect("a number"),
    );
    let server = server();
    let mut redis = connect(&server);
    let mut numbers = Numbers(seed);
    let locks: Vec<Lock> = (0..KEYS)
        .map(|n| Lock::make(&mut redis, &mut numbers, n))
        .collect();
    let counter = counter_of(&server);
    let mut made = 0;
    while made < ATTEMPTS {
        let started = Instant::now();
        let (values, ttls) = seen(&mut redis, &locks);
        let mut batch = redis::pipe();
        let end = made + BATCH;
        while made < end {
            let (call, attempts) = attempt(&mut numbers, &locks);
            batch.add_command(call);
            made += attempts;
        }
        let said: Vec<Value> = batch.query(&mut redis).unwrap();
        said.iter().for_each(|value| assert_refused(value, seed));
        let (values_then, ttls_then) = seen(&mut redis, &locks);
        let passed = started.elapsed().as_millis() as i64 + 1;
        assert_eq!(values_then, values, "seed {seed}");
        for (before, after) in ttls.iter().zip(&ttls_then) {
            let range = before - passed..=*before;
            assert!(range.contains(after), "seed {seed}: {after} in {range:?}");
        }
    }
    assert_eq!(counter_of(&server), counter, "seed {seed}");
    let keys = ask(&server, &["DBSIZE"]).as_int();
    assert_eq!(keys, Some((KEYS + KEYS / 2 + 1) as i64), "seed {seed}");
    all_holders_release(&server, &mut redis, &locks);
}

/// The holders' own requests succeed, so the attempts had the right form.
fn all_holders_release(server: &Server, redis: &mut Connection, locks: &[Lock]) {
    for Lock { key, holder, .. } in locks {
        let renewed = call(redis, &RENEW, &[key], &[holder, "999000"]);
        assert_eq!(ends(&renewed), ["done"]);
        assert_eq!(ends(&release(redis, &[key], &[holder])), ["done"]);
        let now = text_of(server, key);
        assert!(now.is_none_or(|value| !value.contains(holder)));
    }
}
