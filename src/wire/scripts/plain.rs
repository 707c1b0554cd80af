//! Acquires and releases by plain commands instead of scripts, which take Redis more time.
//!
//! # Acquires
//!
//! A transaction acquires the free keys of a batch: `MULTI`, a `SET NX PX` for each key, `EXISTS` on the queues of
//! waiters, `TIME` once a second, `ZADD XX GT` and `ZADD XX INCR` on the fence counter, `EXEC`. A key is granted if its
//! `SET` has succeeded, the counter exists and is usable, and, for a request that may wait, no key of the batch has a
//! queue. When the reply to `EXEC` is read, the script acquires all other keys, under the same lease ids. So outcomes
//! and errors are those of the script. `EXEC` undoes nothing. So if a `SET` has set a key without a grant, the script
//! first deletes the lease's value, which has no token, and then decides as if the key had been free.
//!
//! The script acquires from the start:
//!
//! - a lease that may be queued already, and a request behind `ASKING`;
//! - a key that this connection has found taken in the last ten seconds;
//! - all keys, if the server has refused one of the commands in the last ten minutes, or has closed the connections of
//!   several trials;
//! - all keys, if the connection has no reply to `TIME` from the last ten seconds. So a new connection begins with the
//!   script, which shows that the user may call scripts: without that right, the user could not release the locks.
//!
//! # Tokens
//!
//! The first `ZADD` raises the counter to an estimate E of the time of Redis, and the second one counts the grants. E
//! is the last reply to `TIME` on this connection, plus the time since that reply, less 1 %. The values are written
//! before the tokens are known, so they have [`NO_TOKEN`]: a release compares the whole value, and `inspect` finds no
//! token.
//!
//! Tokens rise as with the script:
//!
//! | case | why a later token of the key is greater |
//! |---|---|
//! | two clients, with estimates ahead or behind | each grant adds 1 to the counter, and E can only raise the counter |
//! | the clock of Redis is set forward or back | the same |
//! | the counter is deleted, or Redis is flushed | with `XX`, these commands make no counter, and the grants do not count. Only the script makes a counter, with the time of Redis |
//! | a fail-over that the client notices | the new connection begins with the script, and takes E from the new primary |
//! | a fail-over that the client does not notice, to a replica that was behind | E is not less than a token that was given 100 ms and a round trip before. So tokens rise if the fail-over takes longer than that |
//!
//! # Releases
//!
//! Redis 8.4 has `DELEX key IFEQ value`, and Valkey 9.0 has `DELIFEQ key value`. In a batch with few releases, such a
//! command releases each lock without waiters whose release a caller awaits. For each other reply than "deleted", the
//! script decides. A connection tries both commands behind its first release by the script, on a key that holds another
//! value.

use std::time::Duration;

use redis::Value;
use smallvec::smallvec;

use crate::command::encoder::Encoder;
use crate::command::value;
use crate::command::value::{MAX_MICROS, NO_TOKEN};
use crate::command::{Acquire, Command, Link, Mode, QueueMode, Release};
use crate::config::key::Key;
use crate::report::error::Error;
use crate::store::completion::Few;
use crate::util::clock::MonotonicTime;
use crate::util::id;
use crate::util::id::LeaseId;
use crate::wire::net::error_replies;
use crate::wire::scripts::ScriptContext;

/// A connection estimates the time of Redis for this long after a reply to `TIME`.
pub const LONGEST_ESTIMATE: Duration = Duration::from_secs(10);

/// After this time, the next acquires ask for the time of Redis again.
const OLD_ESTIMATE: Duration = Duration::from_secs(1);

/// A lower bound for the time of Redis, from the last reply to `TIME` on a connection.
#[derive(Debug, Default)]
pub struct ServerClock {
    /// The time of Redis in µs, and when its reply was read.
    shown: Option<(u64, MonotonicTime)>,
}

impl ServerClock {
    /// Records that the clock of Redis showed `micros` before `now`.
    pub fn record(&mut self, micros: u64, now: MonotonicTime) {
        self.shown = Some((micros, now));
    }

    /// Makes the last reply old.
    #[cfg(test)]
    pub fn age(&mut self) {
        let by = 2 * OLD_ESTIMATE;
        if let Some((micros, seen)) = &mut self.shown {
            *micros -= by.as_micros() as u64;
            *seen = seen.before(by);
        }
    }

    /// Whether to ask for the time again.
    pub fn is_old(&self, now: MonotonicTime) -> bool {
        let age = self.shown.map(|(_, seen)| now.since(seen));
        age.is_none_or(|age| age > OLD_ESTIMATE)
    }

    /// A time in µs that the clock of Redis has passed at `now`, unless that clock was set back. The result is behind
    /// the clock by the time that the last reply took to arrive, and by 1 % of the time since then, since clocks run at
    /// different speeds. `None` after [`LONGEST_ESTIMATE`].
    pub fn at(&self, now: MonotonicTime) -> Option<u64> {
        let (micros, seen) = self.shown?;
        let since = now.since(seen);
        let elapsed = since - since / 100;
        (since <= LONGEST_ESTIMATE).then(|| micros.saturating_add(elapsed.as_micros() as u64))
    }
}

/// Whether plain commands can carry out this command. If the lease may be in the queue in Redis, they cannot: only the
/// script checks whether it is the lease's turn.
pub fn can_grant(command: &Command) -> bool {
    matches!(
        command,
        Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            queue_mode: QueueMode::None | QueueMode::Polling | QueueMode::Notified,
            link: Link::Alone,
            ..
        })
    )
}

/// Appends acquires for `commands`, for which [`can_grant`] is true. On a Cluster, their keys have the same slot.
/// `clock` is the estimate of the time of Redis in µs. With `asks_time`, the transaction also asks for the time.
/// Returns how many replies come before the reply to `EXEC`.
pub fn encode_acquires<'a>(
    buffer: &mut Vec<u8>,
    context: &ScriptContext,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
    clock: u64,
    asks_time: bool,
) -> usize {
    let mut out = Encoder(buffer);
    out.word("MULTI");
    for command in commands.clone() {
        let Command::Acquire(Acquire {
            key, lease, ttl, ..
        }) = command
        else {
            unreachable!("can_grant is true for each command");
        };
        out.array(6);
        out.text("SET");
        out.text(key.in_redis());
        let mut digits = [0; LeaseId::DIGITS];
        out.parts(&value::parts(
            lease.encode(&mut digits),
            NO_TOKEN,
            &context.holder,
        ));
        out.text("NX");
        out.text("PX");
        out.millis(*ttl);
    }
    let queues = commands.clone().filter(|command| command.may_queue());
    let queues = queues.filter_map(Command::key);
    let queue_count = queues.clone().count();
    if queue_count > 0 {
        out.array(1 + queue_count);
        out.text("EXISTS");
        for key in queues {
            out.parts(&key.queue_parts(context.layout));
        }
    }
    if asks_time {
        out.word("TIME");
    }
    let tag = commands.clone().find_map(Command::key);
    let tag = tag.map_or("", |key| key.fence_tag(context.layout));
    let counter = [&*context.fence_counter, tag];
    for (what, number) in [("GT", clock), ("INCR", commands.len() as u64)] {
        out.array(6);
        out.text("ZADD");
        out.parts(&counter);
        out.text("XX");
        out.text(what);
        out.number(number);
        out.text(COUNTER_MEMBER);
    }
    out.word("EXEC");
    // MULTI, SET, EXISTS, TIME and ZADD.
    1 + commands.len() + usize::from(queue_count > 0) + usize::from(asks_time) + 2
}

/// The member of the fence counter, whose score is the time of the last grant in µs.
const COUNTER_MEMBER: &str = "t";

/// Appends a transaction that reads the time of Redis, as a trial of transactions. A proxy may accept `MULTI` and
/// refuse `EXEC`, which makes the connection useless, so the client tries this before an acquire depends on it. Returns
/// how many replies come before the reply to `EXEC`.
pub fn encode_trial(buffer: &mut Vec<u8>) -> usize {
    let mut out = Encoder(buffer);
    out.word("MULTI");
    out.word("TIME");
    out.word("EXEC");
    2
}

/// The time in the reply to [`encode_trial`]. `None` if the server does not accept transactions.
pub fn decode_trial(reply: &Value) -> Option<u64> {
    match reply {
        Value::Array(parts) if parts.len() == 1 => time(&parts[0]),
        _ => None,
    }
}

/// A command that deletes a key if the key has a certain value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareAndDelete {
    /// `DELEX key IFEQ value`, of Redis from 8.4 on.
    Delex,
    /// `DELIFEQ key value`, of Valkey from 9.0 on.
    Delifeq,
}

impl CompareAndDelete {
    pub const ALL: [Self; 2] = [Self::Delex, Self::Delifeq];

    pub fn name(self) -> &'static str {
        match self {
            Self::Delex => "DELEX",
            Self::Delifeq => "DELIFEQ",
        }
    }

    /// Appends the command up to the value.
    fn begin(self, out: &mut Encoder<'_>, key: &Key) {
        match self {
            Self::Delex => {
                out.array(4);
                out.text("DELEX");
                out.text(key.in_redis());
                out.text("IFEQ");
            }
            Self::Delifeq => {
                out.array(3);
                out.text("DELIFEQ");
                out.text(key.in_redis());
            }
        }
    }

    /// Appends the release of a lock without waiters, for which [`can_delete`] is true.
    pub fn encode_release(self, buffer: &mut Vec<u8>, context: &ScriptContext, release: &Command) {
        let Command::Release(Release {
            key,
            lease,
            held: Some(held),
            ..
        }) = release
        else {
            unreachable!("can_delete is true for the release");
        };
        let mut out = Encoder(buffer);
        self.begin(&mut out, key);
        out.held_value(&context.holder, *lease, *held);
    }

    /// Appends a trial of the command, to find out whether the server has it. The trial compares `key` with a value
    /// that locks never have.
    pub fn encode_trial(self, buffer: &mut Vec<u8>, key: &Key) {
        let mut out = Encoder(buffer);
        self.begin(&mut out, key);
        out.text("lh1");
    }
}

/// The command with which the server compares and deletes, as far as a connection knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deletes {
    /// Unknown. A trial of each command follows the next awaited release, unless the server has refused one lately.
    #[default]
    Untried,
    /// Trials are under way.
    Trying,
    Has(CompareAndDelete),
    /// The server has neither command, or a proxy refuses them.
    Neither,
}

impl Deletes {
    /// Records the reply to a trial of `command`. The replies come in the order of [`CompareAndDelete::ALL`].
    pub fn record_trial(&mut self, command: CompareAndDelete, reply: &Value) {
        let is_known = match reply {
            Value::Int(_) => true,
            // The command exists: the key has a value of another type.
            Value::ServerError(error) => error.code() == "WRONGTYPE",
            _ => false,
        };
        let is_last = CompareAndDelete::ALL.last() == Some(&command);
        match self {
            Self::Trying if is_known => *self = Self::Has(command),
            // This refusal may end: an ACL may change, the server may be loading, or the slot has moved.
            Self::Trying if is_denied(reply) || !is_lasting(reply) => *self = Self::Untried,
            Self::Trying if is_last => *self = Self::Neither,
            _ => {}
        }
    }
}

/// Whether the release can be a comparison of the whole value and a deletion: a guard held the lease, and no waiter is
/// queued as far as the client knows.
pub fn can_delete(command: &Command) -> bool {
    let Command::Release(release) = command else {
        return false;
    };
    let is_alone = release.held.is_some_and(|held| !held.others_queued);
    is_alone && release.queued.is_none() && release.is_usual()
}

/// The outcome for one key of the transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// Granted with this token.
    Granted(u64),
    /// Plain commands have not set the key: it is taken, or they were not carried out.
    NotSet,
    /// Plain commands may have set the key, but there is no usable token. The script decides.
    MayBeSet,
}

/// The reply to [`encode_acquires`].
#[derive(Debug, PartialEq, Eq)]
pub struct Acquires {
    pub outcomes: Few<KeyOutcome>,
    /// The time of Redis in µs.
    pub clock: Option<u64>,
}

/// Reads the reply to `EXEC` of [`encode_acquires`]. `is_queued`: the server has accepted `MULTI`. Returns an error if
/// servers never send this reply.
pub fn decode_acquires<'a>(
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
    asks_time: bool,
    is_queued: bool,
    reply: &Value,
) -> Result<Acquires, Error> {
    let n = commands.len();
    let all = |outcome| Acquires {
        outcomes: smallvec![outcome; n],
        clock: None,
    };
    let unexpected = || error_replies::unexpected_reply("EXEC", reply);
    let parts = match reply {
        Value::Array(parts) => parts,
        // If Redis refuses `EXEC`, it discards the transaction, and carries out none of the commands.
        Value::ServerError(error) if is_queued && error_replies::is_redis_code(error.code()) => {
            return Ok(all(KeyOutcome::NotSet));
        }
        // A server that has refused `MULTI` has carried out the other commands one by one. It also replies `EXECABORT`
        // if an ACL refuses `EXEC`.
        Value::ServerError(_) => return Ok(all(KeyOutcome::MayBeSet)),
        _ => return Err(unexpected()),
    };
    let (sets, rest) = parts.split_at_checked(n).ok_or_else(unexpected)?;
    let asks_queues = commands.clone().any(Command::may_queue);
    let mut rest = rest.iter();
    // Any other reply means that a queue exists, or that the server has refused EXISTS.
    let has_queues = asks_queues && rest.next() != Some(&Value::Int(0));
    let shown = if asks_time { rest.next() } else { None };
    let (Some(raised), Some(last), None) = (rest.next(), rest.next(), rest.next()) else {
        return Err(unexpected());
    };
    let last = micros(last).filter(|_| matches!(raised, Value::Int(_)));
    let mut token = last.and_then(|last| (last + 1).checked_sub(n as u64));
    let outcomes = commands.zip(sets).map(|(command, set)| {
        let micros = token;
        token = token.map(|micros| micros + 1);
        match (set, micros) {
            (Value::Nil, _) => KeyOutcome::NotSet,
            (Value::Okay, Some(micros)) if !(has_queues && command.may_queue()) => {
                KeyOutcome::Granted(value::token_of(micros))
            }
            _ => KeyOutcome::MayBeSet,
        }
    });
    Ok(Acquires {
        outcomes: outcomes.collect(),
        clock: shown.and_then(time),
    })
}

/// The time of a grant in µs, from the reply to `ZADD INCR`. `None` if the counter is missing or unusable, as in
/// lua/count.lua.
fn micros(reply: &Value) -> Option<u64> {
    let number = match reply {
        Value::Double(number) => *number,
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok()?,
        _ => return None,
    };
    let micros = number as u64;
    let is_time = micros as f64 == number && (FIRST_MICROS..=MAX_MICROS).contains(&micros);
    is_time.then_some(micros)
}

/// The least time of a grant: times have sixteen digits.
const FIRST_MICROS: u64 = 1_000_000_000_000_000;

fn time(reply: &Value) -> Option<u64> {
    let Value::Array(parts) = reply else {
        return None;
    };
    let [Value::BulkString(secs), Value::BulkString(micros)] = parts.as_slice() else {
        return None;
    };
    let number = |digits| id::number(std::str::from_utf8(digits).ok()?);
    let micros = number(micros)?;
    number(secs)?.checked_mul(1_000_000)?.checked_add(micros)
}

/// Whether an ACL forbids the command. (A server that does not know the command sends another error, and writes nothing
/// to `ACL LOG`.)
pub fn is_denied(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if error.code() == "NOPERM") && is_lasting(reply)
}

/// Whether a refusal of these commands will last, because the server, a proxy or an ACL does not allow one of them.
/// Other causes, such as a full or loading server, a replica, or a forbidden key, refuse the script, too.
pub fn is_lasting(refusal: &Value) -> bool {
    let Value::ServerError(error) = refusal else {
        return false;
    };
    let detail = error.details().unwrap_or_default();
    match error.code() {
        // Redis discards the transaction if an ACL forbids `EXEC`.
        "NOPERM" | "EXECABORT" => detail.contains("to run the"),
        "ERR" => true,
        code => !error_replies::is_redis_code(code),
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn acquires(n: usize, queue_mode: QueueMode) -> Vec<Command> {
        let acquire = |n| {
            Command::Acquire(Acquire {
                mode: Mode::Exclusive,
                key: Key::new("p:", &format!("k{n}"), 10).unwrap(),
                lease: LeaseId::random(),
                ttl: Duration::from_secs(1),
                queue_mode,
                link: crate::command::Link::Alone,
                replicas: None,
            })
        };
        (0..n).map(acquire).collect()
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    /// The reply for two keys. `queues` is the reply to `EXISTS`, if it was sent.
    fn reply(sets: [Value; 2], queues: Option<Value>, last: Value) -> Value {
        let time = Value::Array(vec![text("1795263780"), text("943818")]);
        let rest = queues.into_iter().chain([time, Value::Int(0), last]);
        Value::Array(sets.into_iter().chain(rest).collect())
    }

    fn tried(mode: QueueMode, reply: &Value) -> Vec<KeyOutcome> {
        let commands = acquires(2, mode);
        let acquires = decode_acquires(commands.iter(), true, true, reply).unwrap();
        acquires.outcomes.to_vec()
    }

    #[test]
    fn an_estimate_stays_behind_the_clock_and_ends() {
        let now = MonotonicTime::now();
        let mut clock = ServerClock::default();
        assert_eq!(clock.at(now), None);
        assert!(clock.is_old(now));
        clock.record(1_795_263_780_000_000, now);
        assert_eq!(clock.at(now), Some(1_795_263_780_000_000));
        assert!(!clock.is_old(now.after(OLD_ESTIMATE)));
        let later = now.after(LONGEST_ESTIMATE);
        assert!(clock.is_old(later));
        assert_eq!(clock.at(later), Some(1_795_263_789_900_000));
        assert_eq!(clock.at(later.after(Duration::from_millis(1))), None);
        // The clock of Redis was set back.
        clock.record(1_795_263_700_000_000, later);
        assert_eq!(clock.at(later), Some(1_795_263_700_000_000));
    }

    #[test]
    fn the_keys_of_a_batch_share_no_token() {
        let last = Value::Double(1_795_263_780_943_820.0);
        let both = reply([Value::Okay, Value::Okay], None, last.clone());
        let [first, second] =
            [19, 20].map(|n| KeyOutcome::Granted((1_795_263_780_943_800 + n) << 10));
        assert_eq!(tried(QueueMode::None, &both), [first, second]);
        let one = reply([Value::Nil, Value::Okay], None, text("1795263780943820"));
        assert_eq!(tried(QueueMode::None, &one), [KeyOutcome::NotSet, second]);
        let queued = reply([Value::Okay, Value::Nil], Some(Value::Int(1)), last.clone());
        assert_eq!(
            tried(QueueMode::Notified, &queued),
            [KeyOutcome::MayBeSet, KeyOutcome::NotSet]
        );
        let free = reply([Value::Okay, Value::Okay], Some(Value::Int(0)), last);
        assert_eq!(tried(QueueMode::Notified, &free), [first, second]);
    }

    #[test]
    fn a_reply_without_the_time_is_complete() {
        let last = Value::Double(1_795_263_780_943_820.0);
        let short = Value::Array(vec![Value::Okay, Value::Okay, Value::Int(1), last.clone()]);
        let commands = acquires(2, QueueMode::None);
        let acquires = decode_acquires(commands.iter(), false, true, &short).unwrap();
        assert_eq!(acquires.clock, None);
        assert!(matches!(
            acquires.outcomes[..],
            [KeyOutcome::Granted(_), KeyOutcome::Granted(_)]
        ));
        decode_acquires(commands.iter(), true, true, &short).unwrap_err();
        let long = reply([Value::Okay, Value::Okay], None, last);
        decode_acquires(commands.iter(), false, true, &long).unwrap_err();
    }

    #[test]
    fn a_grant_without_a_token_does_not_count() {
        let error = redis::parse_redis_value(b"-WRONGTYPE no\r\n").unwrap();
        for last in [
            Value::Nil,
            error.clone(),
            Value::Double(f64::INFINITY),
            Value::Double(2.0),
            Value::Double(1_795_263_780_943_818.5),
            Value::Double(9_007_199_254_000_001.0),
            text("nan"),
        ] {
            let reply = reply([Value::Okay, Value::Nil], None, last.clone());
            let wanted = [KeyOutcome::MayBeSet, KeyOutcome::NotSet];
            assert_eq!(tried(QueueMode::None, &reply), wanted, "{last:?}");
        }
        for odd in [Value::Nil, Value::Okay, Value::Array(Vec::new())] {
            decode_acquires(acquires(2, QueueMode::None).iter(), true, true, &odd).unwrap_err();
        }
    }

    #[test]
    fn a_refused_exec_discards_only_what_was_queued() {
        let tried = |reply: &str, is_queued| {
            let commands = acquires(1, QueueMode::None);
            let reply = redis::parse_redis_value(format!("-{reply}\r\n").as_bytes()).unwrap();
            let acquires = decode_acquires(commands.iter(), true, is_queued, &reply);
            acquires.unwrap().outcomes[0]
        };
        for refused in ["EXECABORT discarded", "MOVED 7 127.0.0.1:1"] {
            assert_eq!(tried(refused, true), KeyOutcome::NotSet);
            assert_eq!(tried(refused, false), KeyOutcome::MayBeSet);
        }
        assert_eq!(tried("proxy: not supported", true), KeyOutcome::MayBeSet);
    }

    #[test]
    fn a_denied_delete_is_not_a_missing_one() {
        use CompareAndDelete::{Delex, Delifeq};
        let after = |replies: [&str; 2]| {
            let mut deletes = Deletes::Trying;
            for (command, reply) in CompareAndDelete::ALL.into_iter().zip(replies) {
                let reply = redis::parse_redis_value(format!("{reply}\r\n").as_bytes()).unwrap();
                deletes.record_trial(command, &reply);
            }
            deletes
        };
        let unknown = "-ERR unknown command 'x'";
        let denied = "-NOPERM User u has no permissions to run the 'delex' command";
        for known in [":0", "-WRONGTYPE Operation against a key"] {
            assert_eq!(after([known, unknown]), Deletes::Has(Delex));
            assert_eq!(after([unknown, known]), Deletes::Has(Delifeq));
        }
        assert_eq!(after([denied, unknown]), Deletes::Untried);
        assert_eq!(after([unknown, denied]), Deletes::Untried);
        // A server finds out whether it has a command before it redirects.
        let moved = "-MOVED 7 127.0.0.1:1";
        assert_eq!(after([moved, unknown]), Deletes::Untried);
        assert_eq!(after([unknown, moved]), Deletes::Untried);
        assert_eq!(after([unknown, "-proxy: not supported"]), Deletes::Neither);
    }

    #[test]
    fn only_refusals_of_commands_last() {
        let is_lasting = |reply: &str| {
            let reply = redis::parse_redis_value(format!("-{reply}\r\n").as_bytes());
            is_lasting(&reply.unwrap())
        };
        assert!(is_lasting(
            "NOPERM this user has no permissions to run the 'multi' command"
        ));
        assert!(is_lasting("ERR unknown command 'MULTI'"));
        assert!(is_lasting("proxy: not supported"));
        for passing in [
            "NOPERM this user has no permissions to access one of the keys",
            "OOM command not allowed when used memory > 'maxmemory'.",
            "READONLY You can't write against a read only replica.",
            "MOVED 7 host:1",
            "EXECABORT Transaction discarded because of previous errors.",
        ] {
            assert!(!is_lasting(passing), "{passing}");
        }
    }
}
