//! The Lua scripts, called directly on a real server with their comments. The tests rely only on what the headers of
//! the scripts say.

mod adopt;
mod batches;
mod bounds;
mod claim;
mod fenced;
mod force;
mod grants;
mod headers;
mod inspect;
mod other_leases;
mod queue;
mod quorum;
mod redisson;
mod replicas;
mod shares;
mod signals;
mod tokens;

use std::sync::LazyLock;

use leasehold_testbed::{Reply, Server};
use redis::{Connection, PubSub, Value};

use crate::support::{SOON, ask, server};

#[path = "../../../lua/parts.rs"]
mod parts;

use parts::whole;

type Script = LazyLock<String>;
static ACQUIRE: Script = Script::new(|| whole(include_str!("../../../lua/acquire.lua")));
pub static RELEASE: Script = Script::new(|| whole(include_str!("../../../lua/release.lua")));
static RENEW: Script = Script::new(|| whole(include_str!("../../../lua/renew.lua")));
static ADOPT: Script = Script::new(|| whole(include_str!("../../../lua/adopt.lua")));
static INSPECT: Script = Script::new(|| whole(include_str!("../../../lua/inspect.lua")));
static WRITE: Script = Script::new(|| whole(include_str!("../../../lua/write.lua")));
static PROPOSE: Script = Script::new(|| whole(include_str!("../../../lua/propose.lua")));
static HOLD: Script = Script::new(|| whole(include_str!("../../../lua/hold.lua")));
static PROBE: Script = Script::new(|| whole(include_str!("../../../lua/probe.lua")));
static DATA: Script = Script::new(|| whole(include_str!("../../../lua/data.lua")));
static CLAIM: Script = Script::new(|| whole(include_str!("../../../lua/claim.lua")));
static CONVERT: Script = Script::new(|| whole(include_str!("../../../lua/convert.lua")));
static READ: Script = Script::new(|| whole(include_str!("../../../lua/read.lua")));

const FENCE: &str = "p:~fence";
const ONE: &str = "11111111111111111111111111111111";
const TWO: &str = "22222222222222222222222222222222";
const TTL: &str = "60000";
/// The time of the grant in [`value`].
const MICROS: &str = "1795263780943818";

/// After this command, the user can use keys that begin with `k`, and can read the fence counter, but not write it.
/// Needs Redis 7: see [`has_selectors`].
const READS_THE_COUNTER: &str = "ACL SETUSER default resetkeys ~k* %R~p:~fence (+eval ~*)";
const READS_IT_NO_MORE: &str = "ACL SETUSER default clearselectors allkeys";
/// After this command, the user can use only keys that begin with `k`. Redis refuses each call with the fence counter.
const NO_COUNTER: &str = "ACL SETUSER default resetkeys ~k*";
const ALL_KEYS: &str = "ACL SETUSER default allkeys";

/// Whether the server has read-only permissions for keys, and permissions that apply to some commands only.
/// Redis 6.2 has neither: it refuses a call with a key that the user may not write.
fn has_selectors(server: &Server) -> bool {
    let tried = ["ACL", "SETUSER", "tried", "(+eval ~*)"];
    !matches!(server.command(&tried).unwrap(), Reply::Error(_))
}

fn connect(server: &Server) -> Connection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_connection_with_timeout(SOON).unwrap()
}

/// The result of a script for one lock key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Number(i64),
    Text(String),
    /// The ms for which the key is taken, the number of waiters before this one, and its position in µs.
    Queued {
        left: i64,
        ahead: i64,
        since: u64,
    },
    /// The ms until an adopted lock expires, and the µs part of its new token.
    Adopted {
        left: i64,
        micros: u64,
    },
    Error(String),
}

impl Said {
    /// The result as text; a number as its digits.
    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) | Self::Error(text) => text.clone(),
            Self::Queued { .. } | Self::Adopted { .. } => format!("{self:?}"),
        }
    }
}

type Outcomes = Vec<Said>;

/// The result for each lock key, even if the script returns one result for all keys, or Redis refuses the whole call.
fn call(connection: &mut Connection, script: &str, keys: &[&str], args: &[&str]) -> Outcomes {
    let said = answer(connection, script, keys, args);
    let locks = keys.iter().filter(|key| **key != FENCE).count();
    match said.as_slice() {
        // Only a script whose header says so may return one result for all keys.
        [Said::Error(_)] => vec![said[0].clone(); locks],
        [Said::Number(1)] if script.contains(" or 1: all ") => vec![Said::Number(1); locks],
        [Said::Text(first)] if script == *ACQUIRE => {
            let first: u64 = first.parse().unwrap();
            let counted = (first..).take(locks);
            counted
                .map(|micros| Said::Text(micros.to_string()))
                .collect()
        }
        _ => said,
    }
}

/// The name of the queue of a lock key in these tests.
fn queue_name(key: &str) -> String {
    format!("{key}~queue")
}

/// The call of a script. If the script's header requires it, the queues of the lock keys follow the lock keys, and the
/// fence counter comes first.
fn eval(script: &str, keys: &[&str], args: &[&str]) -> redis::Cmd {
    let locks = keys.iter().filter(|key| **key != FENCE);
    let modes = || args.iter().skip(3).step_by(3);
    let queues: Vec<String> = if script == *ACQUIRE {
        let with_mode = locks.zip(modes()).filter(|(_, mode)| !mode.is_empty());
        with_mode.map(|(key, _)| queue_name(key)).collect()
    } else if [&**RELEASE, &INSPECT, &CONVERT].contains(&script) {
        locks.map(|key| queue_name(key)).collect()
    } else {
        Vec::new()
    };
    let has_counter = [&**ADOPT, &CONVERT].contains(&script);
    let counter = (has_counter && !keys.contains(&FENCE)).then_some(FENCE);
    let counter: Vec<&str> = counter.into_iter().collect();
    let mut eval = redis::cmd("EVAL");
    eval.arg(script)
        .arg(counter.len() + keys.len() + queues.len());
    eval.arg(counter).arg(keys).arg(queues).arg(args);
    eval
}

/// The result of a script for one lock key.
fn result_of(value: Value) -> Said {
    match value {
        Value::Int(number) => Said::Number(number),
        Value::BulkString(bytes) => Said::Text(String::from_utf8_lossy(&bytes).into_owned()),
        Value::ServerError(error) => {
            let details = error.details().unwrap_or("");
            Said::Error(own_words(&format!("{} {details}", error.code())))
        }
        Value::Array(parts) => match parts[..] {
            [Value::Int(left), Value::Int(ahead), Value::Int(since)] => Said::Queued {
                left,
                ahead,
                since: since.try_into().unwrap(),
            },
            [Value::Int(left), Value::BulkString(ref micros)] => Said::Adopted {
                left,
                micros: std::str::from_utf8(micros).unwrap().parse().unwrap(),
            },
            _ => panic!("no result of a lock key: {parts:?}"),
        },
        other => panic!("no result of a lock key: {other:?}"),
    }
}

/// Calls a script, and returns the results in its reply: an array for several locks, otherwise a single result.
fn answer(connection: &mut Connection, script: &str, keys: &[&str], args: &[&str]) -> Outcomes {
    let packed = eval(script, keys, args).get_packed_command();
    connection.send_packed_command(&packed).unwrap();
    let locks = keys.iter().filter(|key| **key != FENCE).count();
    match connection.recv_response().unwrap() {
        Value::Array(values) if locks > 1 => values.into_iter().map(result_of).collect(),
        one => vec![result_of(one)],
    }
}

/// An error as Redis 7 writes it. Redis 6.2 puts `@user_script: 18: -` before the errors of refused commands.
fn own_words(error: &str) -> String {
    let inside = error.strip_prefix("@user_script: ");
    let own = inside.and_then(|inside| inside.split_once(": "));
    let own = own.map_or(error, |(_line, own)| own);
    own.strip_prefix('-').unwrap_or(own).to_owned()
}

/// Requests all `keys` at once under the lease id [`ONE`], without a queue mode.
fn acquire(connection: &mut Connection, keys: &[&str]) -> Outcomes {
    acquire_under(&vec![ONE; keys.len()], connection, keys)
}

/// As [`acquire`], with the lease id at the same index for each key.
fn acquire_under(leases: &[&str], connection: &mut Connection, keys: &[&str]) -> Outcomes {
    let mut args = vec!["host/1/0"];
    leases.iter().for_each(|id| args.extend([id, TTL, ""]));
    call(connection, &ACQUIRE, &[&[FENCE], keys].concat(), &args)
}

fn release(connection: &mut Connection, keys: &[&str], leases: &[&str]) -> Outcomes {
    call(connection, &RELEASE, &[&[FENCE], keys].concat(), leases)
}

/// The type in an error FOREIGN without a ttl. A string also has a hash of its value.
#[track_caller]
fn foreign_type(text: &str) -> String {
    let parts: Vec<&str> = text.split(' ').collect();
    let ["FOREIGN", foreign, "-1", digits] = parts[..] else {
        panic!("{text}");
    };
    assert_eq!(digits.len() == 8, foreign == "string", "{text}");
    foreign.to_owned()
}

/// The kinds of an acquire's results: granted, queued, contended, foreign, refused.
fn kinds(outcomes: &[Said]) -> Vec<&'static str> {
    let kind = |said: &Said| match said {
        Said::Text(_) => "granted",
        Said::Queued { .. } => "queued",
        Said::Number(_) => "contended",
        Said::Adopted { .. } => "adopted",
        Said::Error(text) if text.starts_with("FOREIGN ") => "foreign",
        Said::Error(_) => "refused",
    };
    outcomes.iter().map(kind).collect()
}

/// The kinds of a release's or renewal's results: done, missing, taken, refused.
fn ends(outcomes: &[Said]) -> Vec<&'static str> {
    let end = |said: &Said| match said {
        Said::Number(1) => "done",
        Said::Number(0) => "missing",
        Said::Number(other) => panic!("no header promises {other}"),
        Said::Text(_) => "taken",
        Said::Adopted { .. } => "adopted",
        Said::Queued { .. } => panic!("no header promises {said:?}"),
        Said::Error(_) => "refused",
    };
    outcomes.iter().map(end).collect()
}

/// The time in µs in a grant's token.
#[track_caller]
fn granted(outcome: &Said) -> u64 {
    match outcome {
        Said::Text(micros) => micros.parse().unwrap(),
        other => panic!("not granted: {other:?}"),
    }
}

fn value(lease: &str) -> String {
    format!("lh1 {lease} {MICROS} host/1/0")
}

/// Runs one command without quotes, as typed.
fn say(server: &Server, command: &str) -> Reply {
    ask(server, &command.split(' ').collect::<Vec<_>>())
}

/// The value under the key, unchanged.
fn text_of(server: &Server, key: &str) -> Option<String> {
    ask(server, &["GET", key]).as_text().map(str::to_owned)
}

/// The fence counter.
fn counter_of(server: &Server) -> Option<String> {
    let score = ask(server, &["ZSCORE", FENCE, "t"]);
    score.as_text().map(str::to_owned)
}

fn ttl_of(server: &Server, key: &str) -> i64 {
    ask(server, &["PTTL", key]).as_int().unwrap()
}

/// The lease id of caller `n`: the callers for one lock are numbered, and 0 has it first.
fn lease(n: usize) -> String {
    format!("{n:032x}")
}

/// Caller `n` as the holder of a lock: each caller is a client of its own.
fn holder(n: usize) -> String {
    format!("host/{n}/0")
}

/// The entry of caller `n` in a queue. The ttl is in ms; `0` means that the caller polls.
fn entry(n: usize, ttl: &str) -> String {
    format!("{},{ttl},{}", lease(n), holder(n))
}

/// The waiters for a key, in their order.
fn queue_of(server: &Server, key: &str) -> Vec<String> {
    let Reply::Array(entries) = ask(server, &["ZRANGE", &queue_name(key), "0", "-1"]) else {
        panic!("no queue");
    };
    entries.iter().map(Reply::to_string).collect()
}

/// Caller `n` tries to acquire the key with [`TTL`], in this queue mode.
fn acquire_as(connection: &mut Connection, key: &str, n: usize, mode: &str) -> Said {
    acquire_for(TTL, connection, key, n, mode)
}

fn acquire_for(ttl: &str, connection: &mut Connection, key: &str, n: usize, mode: &str) -> Said {
    let args = [&holder(n), &lease(n), ttl, mode];
    call(connection, &ACQUIRE, &[FENCE, key], &args).remove(0)
}

/// Caller `n` tries to acquire the key with `ttl`, and joins the queue to be notified. If `ttl` is `0`, the caller uses
/// [`TTL`] and polls.
fn join(connection: &mut Connection, key: &str, n: usize, ttl: &str) -> Said {
    if ttl == "0" {
        return acquire_as(connection, key, n, "0");
    }
    acquire_for(ttl, connection, key, n, "+")
}

/// Caller `n` releases the key that it holds.
fn release_as(connection: &mut Connection, key: &str, n: usize) -> Said {
    release(connection, &[key], &[&lease(n)]).remove(0)
}

/// Caller `n` releases the key, or leaves the queue that it joined with this ttl.
fn leave(connection: &mut Connection, key: &str, n: usize, ttl: &str) -> Said {
    // A caller that polls acquires with [`TTL`].
    let ttl = if ttl == "0" { TTL } else { ttl };
    let may_be_queued = format!("{},{ttl},{}", lease(n), holder(n));
    release(connection, &[key], &[&may_be_queued]).remove(0)
}

/// Caller 0 acquires the key, and for each of `ttls` the next caller joins its queue. Returns the value.
#[track_caller]
fn queue_up(connection: &mut Connection, key: &str, ttls: &[&str]) -> String {
    let micros = granted(&acquire_as(connection, key, 0, ""));
    for (n, ttl) in (1..).zip(ttls) {
        let said = join(connection, key, n, ttl);
        assert_eq!(kinds(&[said]), ["queued"], "caller {n}");
    }
    let mark = if ttls.is_empty() { "" } else { " +" };
    format!("lh1 {} {micros} {}{mark}", lease(0), holder(0))
}

/// The entries of callers `first`, `first + 1`, .. with these ttls.
fn entries(first: usize, ttls: &[&str]) -> Vec<String> {
    (first..).zip(ttls).map(|(n, ttl)| entry(n, ttl)).collect()
}

/// The channel of a holder's client.
fn channel(holder: &str) -> String {
    FENCE.replace("fence", "to:") + holder
}

/// Subscribes to the channels of these holders, as their clients would.
fn listen<'a>(connection: &'a mut Connection, holders: &[String]) -> PubSub<'a> {
    connection.set_read_timeout(Some(SOON)).unwrap();
    let mut subscriber = connection.as_pubsub();
    for holder in holders {
        subscriber.subscribe(channel(holder)).unwrap();
    }
    subscriber.subscribe("so far").unwrap();
    subscriber
}

/// The channel and text of each message since the last call.
fn received(server: &Server, subscriber: &mut PubSub) -> Vec<(String, String)> {
    ask(server, &["PUBLISH", "so far", ""]);
    let mut messages = Vec::new();
    loop {
        let message = subscriber.get_message().unwrap();
        if message.get_channel_name() == "so far" {
            return messages;
        }
        let text = message.get_payload().unwrap();
        messages.push((message.get_channel_name().to_owned(), text));
    }
}

#[test]
fn one_bad_key_affects_no_other() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["RPUSH", "b", "theirs"]);
    ask(&server, &["SET", "d", "theirs"]);
    ask(&server, &["SET", "e", &value(TWO), "PX", "5000"]);
    let out = acquire(&mut redis, &["a", "b", "c", "d", "e", "f"]);
    let wanted = [
        "granted",
        "foreign",
        "granted",
        "foreign",
        "contended",
        "granted",
    ];
    assert_eq!(kinds(&out), wanted);
    assert_eq!(foreign_type(&out[1].text()), "list");
    assert_eq!(foreign_type(&out[3].text()), "string");
    let expires_in: i64 = out[4].text().parse().unwrap();
    assert!((1..=5000).contains(&expires_in), "{expires_in}");
    let tokens = [&out[0], &out[2], &out[5]].map(granted);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    for (key, token) in ["a", "c", "f"].into_iter().zip(tokens) {
        let wanted = format!("lh1 {ONE} {token} host/1/0");
        assert_eq!(ask(&server, &["GET", key]).as_text(), Some(wanted.as_str()));
        let ttl = ask(&server, &["PTTL", key]).as_int().unwrap();
        assert!((1..=60_000).contains(&ttl), "{ttl}");
    }
    assert_eq!(ask(&server, &["LLEN", "b"]), Reply::Int(1));
    assert_eq!(ask(&server, &["GET", "d"]).as_text(), Some("theirs"));
    assert_eq!(
        ask(&server, &["ZSCORE", FENCE, "t"]).to_string(),
        tokens[2].to_string()
    );
}

#[test]
fn a_key_repeated_in_one_call_is_granted_once() {
    let server = server();
    let mut redis = connect(&server);
    let leases = [0, 1, 2, 3].map(lease);
    let leases = leases.each_ref().map(String::as_str);
    let out = acquire_under(&leases, &mut redis, &["a", "a", "b", "a"]);
    let wanted = ["granted", "contended", "granted", "contended"];
    assert_eq!(kinds(&out), wanted);
    assert!(granted(&out[0]) < granted(&out[2]));
}

#[test]
fn a_lock_without_ttl_gets_the_requested_one() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "a", &value(TWO)]);
    for keys in [&["a"][..], &["b", "a", "c"]] {
        let out = acquire(&mut redis, keys);
        let healed = &out[keys.len() / 2];
        assert!(matches!(healed, Said::Number(_)), "{out:?}");
        let ttl = ask(&server, &["PTTL", "a"]).as_int().unwrap();
        assert!((1..=60_000).contains(&ttl), "{ttl}");
        ask(&server, &["PERSIST", "a"]);
    }
    assert_eq!(
        ask(&server, &["GET", "a"]).as_text(),
        Some(value(TWO).as_str())
    );
}

#[test]
fn release_deletes_only_its_own_lock() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["own", "none", "theirs", "foreign", "list", "own2"];
    let leases = [ONE, ONE, ONE, ONE, ONE, TWO];
    let prepare = || {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", TTL]);
        ask(&server, &["SET", "own2", &value(TWO), "PX", TTL]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", TTL]);
        ask(&server, &["SET", "foreign", ONE]);
        ask(&server, &["RPUSH", "list", "theirs"]);
    };
    prepare();
    let together = release(&mut redis, &keys, &leases);
    let wanted = ["done", "missing", "taken", "taken", "refused", "done"];
    assert_eq!(ends(&together), wanted);
    assert_eq!(together[2].text(), value(TWO));
    assert_eq!(together[3].text(), ONE);
    assert!(together[4].text().starts_with("WRONGTYPE"));
    assert_eq!(ask(&server, &["DBSIZE"]), Reply::Int(3));
    prepare();
    let each = keys.into_iter().zip(leases);
    let alone = each.flat_map(|(key, id)| release(&mut redis, &[key], &[id]));
    assert_eq!(
        alone.collect::<Vec<_>>(),
        together,
        "one by one as all at once"
    );
    assert_eq!(ask(&server, &["DBSIZE"]), Reply::Int(3));
}

#[test]
fn renew_prolongs_only_its_own_lock() {
    let server = server();
    let mut redis = connect(&server);
    let keys = [
        "own", "none", "theirs", "foreign", "list", "endless", "longer",
    ];
    let ids = [ONE, ONE, ONE, ONE, ONE, TWO, ONE];
    let args: Vec<&str> = ids.iter().flat_map(|id| [*id, TTL]).collect();
    let ttl = |key: &str| ttl_of(&server, key);
    let prepare = || {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", "5000"]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", "5000"]);
        ask(&server, &["SET", "foreign", "theirs", "PX", "5000"]);
        ask(&server, &["RPUSH", "list", "theirs"]);
        ask(&server, &["SET", "endless", &value(TWO)]);
        ask(&server, &["SET", "longer", &value(ONE), "PX", "900000"]);
    };
    let settled = || {
        assert!((50_000..=60_000).contains(&ttl("own")), "{}", ttl("own"));
        assert!(ttl("theirs") <= 5000 && ttl("foreign") <= 5000);
        assert_eq!((ttl("list"), ttl("none")), (-1, -2));
        assert!(
            (50_000..=60_000).contains(&ttl("endless")),
            "{}",
            ttl("endless")
        );
        assert!(ttl("longer") > 800_000, "{}", ttl("longer"));
    };
    // Redis before 7.0 refuses the option.
    let without_the_option = RENEW.replace("'GT'", "'none such'");
    assert_ne!(without_the_option, *RENEW);
    for renew in [RENEW.as_str(), &without_the_option] {
        prepare();
        let together = call(&mut redis, renew, &keys, &args);
        let wanted = [
            "done", "missing", "taken", "taken", "refused", "done", "done",
        ];
        assert_eq!(ends(&together), wanted);
        assert_eq!(together[2].text(), value(TWO));
        settled();
        prepare();
        let each = keys.into_iter().zip(ids);
        let alone = each.flat_map(|(key, id)| call(&mut redis, renew, &[key], &[id, TTL]));
        assert_eq!(
            alone.collect::<Vec<_>>(),
            together,
            "one by one as all at once"
        );
        settled();
    }
}

#[test]
fn a_renewal_that_only_asks_changes_no_ttl() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "short", &value(ONE), "PX", "90000"]);
    ask(&server, &["SET", "endless", &value(ONE)]);
    let keys = ["short", "endless"];
    // Redis before 7.0 refuses the option.
    let without_the_option = RENEW.replace("'GT'", "'none such'");
    for (is_primary, wanted) in [(true, "done"), (false, "refused")] {
        if !is_primary {
            ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
        }
        for renew in [RENEW.as_str(), &without_the_option] {
            let said = call(&mut redis, renew, &keys, &[ONE, "1"].repeat(2));
            assert_eq!(ends(&said), [wanted; 2], "{said:?}");
            assert!((80_000..=90_000).contains(&ttl_of(&server, "short")));
            assert_eq!(ttl_of(&server, "endless"), -1);
        }
    }
}

#[test]
fn without_memory_held_locks_still_renew_and_release() {
    let server = server();
    let mut redis = connect(&server);
    let held = acquire(&mut redis, &["own", "own2"]);
    assert_eq!(kinds(&held), ["granted", "granted"]);
    let counter = ask(&server, &["ZSCORE", FENCE, "t"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);

    for keys in [&["new"][..], &["new", "own", "new2"]] {
        let out = acquire_under(&vec![TWO; keys.len()], &mut redis, keys);
        assert!(out[0].text().starts_with("OOM"), "{out:?}");
        assert!(!kinds(&out).contains(&"granted"), "{out:?}");
    }
    assert_eq!(ask(&server, &["EXISTS", "new", "new2"]), Reply::Int(0));
    assert_eq!(ask(&server, &["ZSCORE", FENCE, "t"]), counter);

    let renewed = call(
        &mut redis,
        &RENEW,
        &["own", "own2"],
        &[ONE, "90000"].repeat(2),
    );
    assert_eq!(ends(&renewed), ["done", "done"]);
    assert!(ask(&server, &["PTTL", "own"]).as_int() > Some(60_000));
    let released = release(&mut redis, &["own2"], &[ONE]);
    assert_eq!(ends(&released), ["done"]);
    // A writer becomes a reader, which becomes a writer again.
    for (from, to, mode) in [(ONE, TWO, "r"), (TWO, ONE, "")] {
        let args = ["host/1/0", from, to, TTL, mode];
        granted(&call(&mut redis, &CONVERT, &["own"], &args)[0]);
    }
    let released = release(&mut redis, &["own"], &[ONE]);
    assert_eq!(ends(&released), ["done"]);
}
