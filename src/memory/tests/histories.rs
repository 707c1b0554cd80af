//! Generates histories of commands for few keys, leases and clients.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::select;

use crate::command::value::{LockValue, micros_of};
use crate::command::{
    Acquire, Adopt, Adoption, Claim, Command, Convert, FIRST_USUAL_PLACE, ForceUnlock, Held, Hold,
    Inspect, Look, Mode, Propose, QueueMode, Read, Release, Renew, Write,
};
use crate::config::key::{Key, KeyLayout};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

/// The clients. The last client does not listen for notifications.
pub const CLIENTS: [&str; 3] = ["host/1/a", "host/2/b", "gone/3/c"];

/// The longest pause in a history. Some keys expire in it.
const LONGEST_PAUSE: u64 = 60;
/// Ages in histories of roll calls, in ms: some are just longer than the time for a roll call, than the time after which a
/// grant has to be confirmed, or than the time for which a key outlives an unconfirmed grant.
const AGES_OF_ROLL_CALLS: [u64; 16] = [
    40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 510, 1_300, 2_010, 3_510,
];

/// The ttls of waiters that have to confirm their grants soon, in ms. The last one ends during the roll call after the
/// others.
const SHORT_TTLS: [u64; 3] = [20, 25, 60];

#[derive(Clone, Debug)]
pub enum Operation {
    Ask {
        by: usize,
        command: Command,
        /// Whether an acquire tries plain commands first, as `wire::scripts::plain` does.
        is_plain: bool,
    },
    Pause(Duration),
    /// Acts as if that much time had passed: moves times in Redis back, which takes no time. A multiple of 1 ms. The times
    /// in tokens stay, so ages in histories with forced releases have to be short: a script compares these times.
    Age(Duration),
    Delete(Key),
    /// Acts as if the key had moved to a server whose clock is ahead by this many ms: changes the ttl of a key with
    /// shares.
    Shift(Key, i64),
    /// Simulates a clock that was set back: moves the fence counter ahead.
    PutBack(Duration),
    /// Deletes the fence counter, unless it is ahead of the clock.
    LoseCounter,
    /// Sets the fence counter to [`COUNTED`].
    Count,
    /// Sets the mark of a quorum's node, or deletes it (`None`). The mark has two properties: whether an earlier
    /// process has written it, and its age.
    Mark(Option<(bool, Age)>),
    /// Checks the data of a quorum's node, as a new connection does.
    LogIn,
}

#[derive(Clone, Copy, Debug)]
pub enum Age {
    Past(Duration),
    /// The time in the mark is an hour in the future.
    Future,
}

/// A value of the fence counter ahead of both clocks, in µs.
pub const COUNTED: u64 = 5_000_000_000_000_000;

/// The length of a quarantine in all histories.
pub const QUARANTINE: Duration = Duration::from_millis(50);

/// The kind of server that gets the commands of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// One server.
    Locks,
    /// One server, with leases that hold their keys alone or share them.
    Shares,
    /// Shares of a key, some of whose waiters do not confirm their grants.
    RollCalls,
    /// A node of a quorum.
    Votes,
}

/// A lock's key. On a Cluster, all keys are in one slot, so that one transaction can read them.
pub fn key(n: usize) -> Key {
    Key::new("p:", ["{k}a", "{k}b"][n], 10).unwrap()
}

pub fn value_key() -> Key {
    Key::for_value(KeyLayout::Single, "p:", "{k}a", 10).unwrap()
}

fn lease(n: usize) -> LeaseId {
    LeaseId::decode(&format!("{:016x}{n:016x}", 0xabc0_0000_0000 + n)).unwrap()
}

pub fn holder(n: usize) -> HolderId {
    HolderId::of_text(CLIENTS[n])
}

/// Stands for the lock's real token in a ticket or a hold.
const RIGHT: u64 = 0;
/// A time in µs that is later than the clock and the fence counter.
const FUTURE: u64 = 8_000_000_000_000_000;
/// A time in µs, long before the test. It has sixteen digits, like all times of grants.
const PAST: u64 = 1_000_000_000_000_001;

/// Replaces the token [`RIGHT`] in a command by the token in the value of the lock's key, which `value` reads.
pub fn with_right_token(command: &Command, value: impl FnOnce() -> Option<String>) -> Command {
    let mut command = command.clone();
    let token = || LockValue::parse(value()?.as_bytes(), 0)?.token;
    match &mut command {
        Command::Adopt(Adopt { grant, .. }) if grant.token == RIGHT => {
            grant.token = token().unwrap_or(RIGHT);
        }
        Command::Release(Release {
            held: Some(held), ..
        }) if held.token == RIGHT => {
            held.token = token().unwrap_or(RIGHT);
        }
        Command::Hold(Hold { micros, .. }) if *micros == RIGHT => {
            *micros = token().map_or(PAST, micros_of);
        }
        _ => {}
    }
    command
}

/// Time that passes. In few histories, the test waits for the clock of Redis.
fn time_passes(ages: impl Strategy<Value = u64>) -> impl Strategy<Value = Operation> {
    let age = ages.prop_map(|ms| Operation::Age(Duration::from_millis(ms)));
    let pause = 1..=LONGEST_PAUSE;
    prop_oneof![
        30 => age,
        1 => pause.prop_map(|ms| Operation::Pause(Duration::from_millis(ms))),
    ]
}

/// A command to a node of a quorum.
fn vote() -> impl Strategy<Value = Command> {
    let key = || (0..2_usize).prop_map(key);
    let lease = || (0..3_usize).prop_map(lease);
    let ttl = || select(vec![20, 45, 5_000, 5_000, 90_000]).prop_map(Duration::from_millis);
    // All but the first are later than both clocks. A node whose counter is at `COUNTED` refuses the last ones.
    let quarantine = QUARANTINE.as_micros() as u64;
    let given = vec![
        PAST,
        COUNTED,
        COUNTED + 5,
        COUNTED + quarantine,
        COUNTED + quarantine + 1,
        COUNTED + 20 * quarantine,
    ];
    let held = [&given[..], &[RIGHT, RIGHT, RIGHT]].concat();
    let until = || select(vec![FUTURE, FUTURE, FUTURE, FUTURE, PAST]);
    let sets_missing = select(vec![Some(FUTURE), Some(FUTURE), Some(PAST), None, None]);
    prop_oneof![
        6 => (key(), lease(), ttl(), select(given.clone()), until()).prop_map(|(key, lease, ttl, micros, until)| {
            Command::Propose(Propose { key, lease, ttl, micros, until })
        }),
        6 => (key(), lease(), ttl(), select(held), sets_missing).prop_map(
            |(key, lease, ttl, micros, sets_missing)| {
                Command::Hold(Hold { key, lease, ttl, micros, sets_missing })
            },
        ),
        3 => (key(), lease()).prop_map(|(key, lease)| {
            Command::Release(Release { min_hold: Duration::ZERO, mode: Mode::Exclusive, key, lease, until: MonotonicTime::at_tick(0), held: None, queued: None })
        }),
        1 => (key(), lease(), any::<bool>()).prop_map(|(key, lease, must_notify)| {
            Command::ForceUnlock(ForceUnlock { share: None, key, lease, must_notify })
        }),
        1 => key().prop_map(|key| Command::Inspect(Inspect { key })),
    ]
}

/// Histories of the commands to a node of a quorum. Most of them begin with a node that votes.
fn votes() -> impl Strategy<Value = Vec<Operation>> {
    let age = select(vec![
        Age::Past(Duration::ZERO),
        Age::Past(QUARANTINE * 4 / 5),
        Age::Past(20 * QUARANTINE),
        Age::Future,
    ]);
    let operation = prop_oneof![
        30 => (0..CLIENTS.len(), vote()).prop_map(|(by, command)| Operation::Ask { by, command, is_plain: false }),
        2 => time_passes(1..=LONGEST_PAUSE),
        1 => (0..2_usize).prop_map(|n| Operation::Delete(key(n))),
        1 => Just(Operation::Count),
        2 => of((any::<bool>(), age)).prop_map(Operation::Mark),
        3 => Just(Operation::LogIn),
    ];
    let usual = Operation::Mark(Some((false, Age::Past(20 * QUARANTINE))));
    let first = prop_oneof![
        5 => Just(vec![usual.clone(), Operation::Count]),
        2 => Just(vec![usual]),
        1 => Just(Vec::new()),
    ];
    (first, vec(operation, 1..40)).prop_map(|(first, others)| [first, others].concat())
}

fn command() -> impl Strategy<Value = Command> {
    let key = || (0..2_usize).prop_map(key);
    let lease = || (0..5_usize).prop_map(lease);
    let ttl = || select(vec![20, 45, 5_000, 5_000, 90_000]).prop_map(Duration::from_millis);
    let queue_mode = select(vec![
        QueueMode::None,
        QueueMode::Polling,
        QueueMode::Polling,
        QueueMode::Notified,
        QueueMode::Notified,
        QueueMode::Rejoin {
            since: 5,
            polls: false,
        },
        QueueMode::Rejoin {
            since: FIRST_USUAL_PLACE + 5,
            polls: false,
        },
        QueueMode::Rejoin {
            since: 7,
            polls: false,
        },
        QueueMode::Rejoin {
            since: 7,
            polls: true,
        },
        QueueMode::Existing { notified: false },
        QueueMode::Existing { notified: true },
    ]);
    let token = select(vec![0, 1, (1 << 53) + 1, (1 << 53) + 2, u64::MAX]);
    prop_oneof![
        6 => (key(), lease(), ttl(), queue_mode).prop_map(|(key, lease, ttl, queue_mode)| {
            Command::Acquire(Acquire { mode: Mode::Exclusive, key, lease, ttl, queue_mode, link: crate::command::Link::Alone, replicas: None })
        }),
        4 => (key(), lease(), of(ttl())).prop_map(|(key, lease, queued)| {
            Command::Release(Release { min_hold: Duration::ZERO, mode: Mode::Exclusive, key, lease, until: MonotonicTime::at_tick(0), held: None, queued })
        }),
        3 => (key(), lease(), select(vec![RIGHT, RIGHT, 7 << 10])).prop_map(|(key, lease, token)| {
            let valid_until = MonotonicTime::at_tick(0);
            let held = Some(Held { token, is_token_in_value: true, others_queued: false, valid_until });
            Command::Release(Release { min_hold: Duration::ZERO, mode: Mode::Exclusive, key, lease, until: MonotonicTime::at_tick(0), held, queued: None })
        }),
        2 => (key(), lease(), any::<bool>()).prop_map(|(key, lease, must_notify)| {
            Command::ForceUnlock(ForceUnlock { share: None, key, lease, must_notify })
        }),
        2 => (key(), lease(), ttl()).prop_map(|(key, lease, ttl)| {
            Command::Renew(Renew { mode: Mode::Exclusive, key, lease, token: 0, ttl, replicas: None })
        }),
        2 => (key(), lease(), lease(), ttl(), any::<bool>(), select(vec![RIGHT, RIGHT, 7 << 10, FUTURE << 10])).prop_map(
            |(key, lease, from, ttl, renew, token)| {
                let grant = Box::new(Adoption { from, token, ttl, longest: ttl, renew, replicas: None });
                Command::Adopt(Adopt { key, lease, grant })
            }
        ),
        3 => (key(), lease(), lease(), ttl()).prop_map(|(key, from, lease, ttl)| {
            Command::Convert(Convert { key, from, lease, mode: Mode::Exclusive, ttl, longest: ttl, replicas: None })
        }),
        1 => key().prop_map(|key| Command::Inspect(Inspect { key })),
        2 => (token, of(vec(any::<u8>(), 0..4)), of(ttl())).prop_map(|(token, value, ttl)| {
            Command::Write(Write { key: value_key(), token, value: value.map(Arc::from), ttl })
        }),
        1 => Just(Command::Read(Read { key: value_key() })),
        3 => (key(), lease(), ttl()).prop_map(|(key, lease, ttl)| {
            Command::Claim(Claim { key, value: value_key(), lease, ttl, term: None, replicas: None })
        }),
        2 => (key(), lease(), ttl(), vec(any::<u8>(), 0..4)).prop_map(|(key, lease, ttl, term)| {
            let term = Some(Arc::from(term));
            Command::Claim(Claim { key, value: value_key(), lease, ttl, term, replicas: None })
        }),
        1 => key().prop_map(|key| Command::Look(Look { key, value: value_key() })),
    ]
}

pub fn histories(subject: Subject) -> BoxedStrategy<Vec<Operation>> {
    match subject {
        Subject::Locks => locks(1, 5).boxed(),
        Subject::Shares => in_modes(locks(2, 8)).boxed(),
        Subject::RollCalls => in_modes(unconfirmed(3, 8, 4..24, &AGES_OF_ROLL_CALLS)).boxed(),
        Subject::Votes => votes().boxed(),
    }
}

/// Grants that their waiters have to confirm, and then requests of waiters. The waiters have numbers below `end`. The
/// first `short` waiters have to confirm within [`SHORT_TTLS`]. `later` requests come around the end of these times.
fn unconfirmed(
    short: usize,
    end: usize,
    later: Range<usize>,
    ages: &[u64],
) -> impl Strategy<Value = Vec<Operation>> {
    let ttl = move |n: usize| match n {
        n if (1..=short).contains(&n) => Duration::from_millis(SHORT_TTLS[n - 1]),
        _ => Duration::from_millis(5_000),
    };
    let ask = move |n: usize, command| Operation::Ask {
        by: n % 2,
        is_plain: false,
        command,
    };
    let waiter = move |n: usize, queue_mode| {
        let acquire = Acquire {
            mode: Mode::Exclusive,
            key: key(0),
            lease: lease(n),
            ttl: ttl(n),
            queue_mode,
            link: crate::command::Link::Alone,
            replicas: None,
        };
        ask(n, Command::Acquire(acquire))
    };
    let release = move |n: usize, queued| {
        let release = Release::unheld(key(0), lease(n), MonotonicTime::at_tick(0));
        ask(n, Command::Release(Release { queued, ..release }))
    };
    let renew = move |n: usize| {
        let renew = Renew {
            mode: Mode::Exclusive,
            key: key(0),
            lease: lease(n),
            token: 0,
            ttl: ttl(n),
            replicas: None,
        };
        ask(n, Command::Renew(renew))
    };
    let begins = (short..end).prop_map(move |waiters| {
        let joins = (1..=waiters).map(|n| {
            let since = FIRST_USUAL_PLACE + 10 + n as u64;
            let polls = n == 4;
            waiter(n, QueueMode::Rejoin { since, polls })
        });
        let joins = [waiter(0, QueueMode::None)].into_iter().chain(joins);
        joins.chain([release(0, None)]).collect::<Vec<_>>()
    });
    let asks = move |n| waiter(n, QueueMode::Existing { notified: false });
    let operation = prop_oneof![
        8 => (1..end).prop_map(asks),
        2 => (1..end).prop_map(move |n| release(n, None)),
        2 => (1..end).prop_map(move |n| release(n, Some(ttl(n)))),
        2 => (1..end).prop_map(renew),
        2 => Just(waiter(3, QueueMode::Notified)),
        2 => Just(waiter(3, QueueMode::None)),
        4 => time_passes(select(ages.to_vec())),
    ];
    let later = vec(operation, later);
    (begins, later).prop_map(|(begins, later)| [begins, later].concat())
}

fn locks(short: usize, end: usize) -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        40 => (0..CLIENTS.len(), command(), any::<bool>())
            .prop_map(|(by, command, is_plain)| Operation::Ask { by, command, is_plain }),
        1 => Just(Operation::LoseCounter),
        1 => time_passes(1..=LONGEST_PAUSE),
        1 => (0..2_usize).prop_map(|n| Operation::Delete(key(n))),
        1 => Just(Operation::PutBack(Duration::from_secs(3600))),
    ];
    // Some histories begin with a long queue, so that waiters move up to the first eight places.
    let waiters_first = (0..16_usize, 0..3_usize).prop_map(|(waiters, gone)| {
        let joins = move |n: usize| Operation::Ask {
            by: if n < gone { CLIENTS.len() - 1 } else { n % 2 },
            is_plain: false,
            command: Command::Acquire(Acquire {
                mode: Mode::Exclusive,
                key: key(0),
                lease: lease(if n == 0 { 0 } else { 100 + n }),
                ttl: Duration::from_millis(5_000),
                queue_mode: QueueMode::Notified,
                link: crate::command::Link::Alone,
                replicas: None,
            }),
        };
        (0..waiters).map(joins).collect::<Vec<_>>()
    });
    let waiters_first = prop_oneof![
        3 => Just(Vec::new()),
        1 => waiters_first,
        2 => unconfirmed(short, end, 0..8, &[40]),
    ];
    (waiters_first, vec(operation, 1..40))
        .prop_map(|(waiters_first, others)| [waiters_first, others].concat())
}

/// The histories, with the modes of shares in place of exclusive ones. Two waiters in place of one have to confirm their
/// grants within a short time, and more waiters are queued.
fn in_modes(
    histories: impl Strategy<Value = Vec<Operation>>,
) -> impl Strategy<Value = Vec<Operation>> {
    let permits = |weight, limit| Mode::Permits { weight, limit };
    let modes = select(vec![
        [Mode::Read, Mode::Read, Mode::Exclusive],
        [permits(1, 3), permits(2, 3), Mode::Exclusive],
        [permits(3, 4), permits(1, 3), Mode::Exclusive],
        [Mode::Read, permits(1, 2), Mode::Exclusive],
    ]);
    (modes, histories, vec(any::<u16>(), 80)).prop_map(|(modes, history, numbers)| {
        let mut numbers = numbers.into_iter().map(usize::from).cycle();
        let mut changed = Vec::new();
        for mut operation in history {
            let n = numbers.next().unwrap_or(0);
            if n.is_multiple_of(16) {
                let ahead = [20_000, -3_000, 3_000, -20_000][n / 16 % 4];
                changed.push(Operation::Shift(key(n / 64 % 2), ahead));
            }
            if let Operation::Ask { by, command, .. } = &mut operation {
                // A share is released only by its own client.
                let own = set_mode(command, modes, n / 5);
                if let Some(own) = own.filter(|_| !(n / 5).is_multiple_of(4)) {
                    *by = own;
                }
            }
            changed.push(operation);
        }
        changed
    })
}

/// Gives a command a mode. Returns the client that most often sends the requests of its lease.
fn set_mode(command: &mut Command, modes: [Mode; 3], n: usize) -> Option<usize> {
    // A lease has one mode.
    let own = match command {
        Command::Convert(Convert {
            from, lease, mode, ..
        }) => {
            *mode = match modes[client_of(*lease)] {
                Mode::Read => Mode::Read,
                _ => Mode::Exclusive,
            };
            let own = if mode.is_read() { *lease } else { *from };
            return Some(client_of(own));
        }
        Command::Acquire(Acquire { lease, .. })
        | Command::Renew(Renew { lease, .. })
        | Command::Release(Release { lease, .. })
        | Command::ForceUnlock(ForceUnlock { lease, .. }) => modes[client_of(*lease)],
        _ => return None,
    };
    let lease = match command {
        Command::Acquire(Acquire { mode, lease, .. })
        | Command::Renew(Renew { mode, lease, .. }) => {
            *mode = own;
            *lease
        }
        Command::Release(Release {
            mode,
            lease,
            held,
            min_hold,
            ..
        }) => {
            *mode = own;
            if let Some(held) = held.as_mut().filter(|_| !n.is_multiple_of(3)) {
                // Until the test knows the clock, this field contains the time since the grant in ms.
                held.token = [0, 400, 70_000][n % 3];
                *min_hold = Duration::from_secs([1, 60][n % 2]);
            }
            *lease
        }
        Command::ForceUnlock(ForceUnlock { share, lease, .. }) => {
            let of = client_of(*lease);
            *share = (!own.is_exclusive()).then(|| (own, holder(of)));
            *lease
        }
        _ => return None,
    };
    Some(client_of(lease))
}

fn client_of(lease: LeaseId) -> usize {
    lease.to_string().bytes().map(usize::from).sum::<usize>() % CLIENTS.len()
}
