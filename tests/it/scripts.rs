//! The Lua scripts, called directly on a real server, comments and all. Knows nothing of the
//! library but what their headers say.

use leasehold_testbed::{Reply, Server};
use redis::{Connection, Value};

use crate::steady::steady;
use crate::support::{SOON, ask, in_redis, server, value_of};

const ACQUIRE: &str = include_str!("../../lua/acquire.lua");
const RELEASE: &str = include_str!("../../lua/release.lua");
const RENEW: &str = include_str!("../../lua/renew.lua");

const FENCE: &str = "p:~fence";
const ONE: &str = "11111111111111111111111111111111";
const TWO: &str = "22222222222222222222222222222222";
const TTL: &str = "60000";

fn connect(server: &Server) -> Connection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_connection_with_timeout(SOON).unwrap()
}

/// What a script said of one lock key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Number(i64),
    Text(String),
    Error(String),
}

impl Said {
    /// What is said in words; a number as its digits.
    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) | Self::Error(text) => text.clone(),
        }
    }
}

type Outcomes = Vec<Said>;

fn call(connection: &mut Connection, script: &str, keys: &[&str], args: &[&str]) -> Outcomes {
    let mut eval = redis::cmd("EVAL");
    eval.arg(script).arg(keys.len()).arg(keys).arg(args);
    let packed = eval.get_packed_command();
    connection.send_packed_command(&packed).unwrap();
    let said = |value: Value| match value {
        Value::Int(number) => Said::Number(number),
        Value::BulkString(bytes) => Said::Text(String::from_utf8_lossy(&bytes).into_owned()),
        Value::ServerError(error) => Said::Error(format!(
            "{} {}",
            error.code(),
            error.details().unwrap_or("")
        )),
        other => panic!("no result of a lock key: {other:?}"),
    };
    match connection.recv_response().unwrap() {
        Value::Array(values) => values.into_iter().map(said).collect(),
        one => vec![said(one)],
    }
}

/// Asks for all `keys` at once under the lease id [`ONE`].
fn acquire(connection: &mut Connection, keys: &[&str]) -> Outcomes {
    let all_keys = [&[FENCE], keys].concat();
    let mut args = vec!["host/1/0"];
    keys.iter().for_each(|_| args.extend([ONE, TTL]));
    call(connection, ACQUIRE, &all_keys, &args)
}

/// Which of its results an acquire gave: granted, contended, foreign, refused.
fn kinds(outcomes: &Outcomes) -> Vec<&'static str> {
    let kind = |said: &Said| match said {
        Said::Text(_) => "granted",
        Said::Number(_) => "contended",
        Said::Error(text) if text.starts_with("FOREIGN ") => "foreign",
        Said::Error(_) => "refused",
    };
    outcomes.iter().map(kind).collect()
}

/// Which of its results a release or renewal gave: done, missing, taken, refused.
fn ends(outcomes: &Outcomes) -> Vec<&'static str> {
    let end = |said: &Said| match said {
        Said::Number(1) => "done",
        Said::Number(0) => "missing",
        Said::Number(other) => panic!("no header promises {other}"),
        Said::Text(_) => "taken",
        Said::Error(_) => "refused",
    };
    outcomes.iter().map(end).collect()
}

/// The time in µs that a grant's token is made of.
#[track_caller]
fn granted(outcome: &Said) -> u64 {
    match outcome {
        Said::Text(micros) => micros.parse().unwrap(),
        other => panic!("not granted: {other:?}"),
    }
}

fn value(lease: &str) -> String {
    format!("lh1 {lease} 1795263780943818 host/1/0")
}

#[test]
fn one_bad_key_costs_the_others_nothing() {
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
    assert!(out[1].text().contains("WRONGTYPE"), "{:?}", out[1]);
    assert_eq!(out[3].text(), "FOREIGN theirs");
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
    assert_eq!(
        ask(&server, &["LRANGE", "b", "0", "-1"]).to_string(),
        "[theirs]"
    );
    assert_eq!(ask(&server, &["GET", "d"]).as_text(), Some("theirs"));
    assert_eq!(
        ask(&server, &["GET", FENCE]).to_string(),
        tokens[2].to_string()
    );
}

#[test]
fn a_key_asked_for_twice_in_one_call_is_granted_once() {
    let server = server();
    let mut redis = connect(&server);
    let out = acquire(&mut redis, &["a", "a", "b", "a"]);
    let wanted = ["granted", "contended", "granted", "contended"];
    assert_eq!(kinds(&out), wanted);
    assert!(granted(&out[0]) < granted(&out[2]));
}

#[test]
fn a_value_of_ours_without_a_ttl_is_given_the_asked_one() {
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
fn tokens_rise_within_and_across_calls_and_survive_the_counter() {
    let server = server();
    let mut redis = connect(&server);
    let mut last = 0;
    for round in 0..50 {
        let out = acquire(&mut redis, &["a", "b", "c"]);
        for outcome in &out {
            let token = granted(outcome);
            assert!(token > last, "{token} after {last} in round {round}");
            last = token;
        }
        ask(&server, &["DEL", "a", "b", "c"]);
        if round % 5 == 0 {
            ask(&server, &["DEL", FENCE]);
        }
    }
    // A counter ahead of the clock is followed, not fallen behind of.
    let ahead = last + 3_600_000_000;
    ask(&server, &["SET", FENCE, &ahead.to_string()]);
    let tokens: Vec<u64> = acquire(&mut redis, &["a", "b"])
        .iter()
        .map(granted)
        .collect();
    assert_eq!(tokens, [ahead + 1, ahead + 2]);
    let next = acquire(&mut redis, &["c"]);
    assert_eq!(granted(&next[0]), ahead + 3);
}

/// What is no time in µs that the counter could be at: none of them may be counted on from, nor
/// overwritten.
const BROKEN: [&str; 14] = [
    "",
    "text",
    "0",
    "179526378094381",
    "17952637809438180",
    "sixteen letters!",
    "-179526378094381",
    " 179526378094381",
    "0x0000000000ffff",
    "1e00000000000015",
    "             nan",
    "             inf",
    // From 2^53 on a double cannot tell one number from the next.
    "9007199254740993",
    "9999999999999999",
];

#[test]
fn a_broken_fence_counter_grants_nothing_and_leaves_no_key() {
    let server = server();
    let mut redis = connect(&server);
    let mut refused = |what: &str| {
        for keys in [&["a"][..], &["a", "b", "c"]] {
            let out = acquire(&mut redis, keys);
            assert!(
                kinds(&out).iter().all(|kind| *kind == "refused"),
                "{what:?}: {out:?}"
            );
            assert_eq!(
                ask(&server, &["DBSIZE"]),
                Reply::Int(1),
                "{what:?}: {out:?}"
            );
        }
    };
    for broken in BROKEN {
        ask(&server, &["SET", FENCE, broken]);
        refused(broken);
        assert_eq!(ask(&server, &["GET", FENCE]).as_text(), Some(broken));
    }
    let huge = "9".repeat(1 << 20);
    ask(&server, &["SET", FENCE, &huge]);
    refused("a megabyte of digits");
    ask(&server, &["DEL", FENCE]);
    ask(&server, &["RPUSH", FENCE, "1795263780943818"]);
    refused("a list");
}

#[test]
fn a_client_is_told_of_a_broken_fence_counter() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let fence = in_redis("~fence");
    ask(&server, &["SET", &fence, "text"]);
    for _ in 0..2 {
        let error = client.mutex("k").lock().unwrap_err();
        assert_eq!(error.kind(), leasehold::ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains("fence"), "{error}");
        assert_eq!(value_of(&server, "k"), None);
        ask(&server, &["DEL", &fence]);
        ask(&server, &["HSET", &fence, "a", "b"]);
    }
    ask(&server, &["DEL", &fence]);
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn the_token_a_holder_sees_is_the_time_that_redis_keeps() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let value = value_of(&server, "k").expect("it is held");
    let micros: u64 = value.split(' ').nth(2).unwrap().parse().unwrap();
    assert_eq!(guard.fencing_token() >> 10, micros);
    let counter = ask(&server, &["GET", &in_redis("~fence")]);
    assert_eq!(counter.to_string(), micros.to_string());
    let Reply::Array(time) = ask(&server, &["TIME"]) else {
        panic!("TIME answers with an array");
    };
    let now = time[0].as_int().unwrap() as u64 * 1_000_000;
    assert!(micros.abs_diff(now) < 60_000_000, "{micros} at {now}");
}

#[test]
fn release_lets_go_of_its_own_only() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["own", "none", "theirs", "foreign", "list", "own2"];
    let prepare = || {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", TTL]);
        ask(&server, &["SET", "own2", &value(ONE), "PX", TTL]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", TTL]);
        ask(&server, &["SET", "foreign", ONE]);
        ask(&server, &["RPUSH", "list", "theirs"]);
    };
    prepare();
    let together = call(&mut redis, RELEASE, &keys, &[ONE; 6]);
    let wanted = ["done", "missing", "taken", "taken", "refused", "done"];
    assert_eq!(ends(&together), wanted);
    assert_eq!(together[2].text(), value(TWO));
    assert_eq!(together[3].text(), ONE);
    assert!(together[4].text().starts_with("WRONGTYPE"));
    assert_eq!(ask(&server, &["DBSIZE"]), Reply::Int(3));
    prepare();
    let alone = keys.map(|key| call(&mut redis, RELEASE, &[key], &[ONE]).remove(0));
    assert_eq!(alone.to_vec(), together, "one by one as all at once");
    assert_eq!(ask(&server, &["DBSIZE"]), Reply::Int(3));
}

#[test]
fn renew_touches_its_own_only_and_never_shortens() {
    let server = server();
    let mut redis = connect(&server);
    let keys = [
        "own", "none", "theirs", "foreign", "list", "endless", "longer",
    ];
    let ttl = |key: &str| ask(&server, &["PTTL", key]).as_int().unwrap();
    let prepare = || {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", "5000"]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", "5000"]);
        ask(&server, &["SET", "foreign", "theirs", "PX", "5000"]);
        ask(&server, &["RPUSH", "list", "theirs"]);
        ask(&server, &["SET", "endless", &value(ONE)]);
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
    prepare();
    let together = call(&mut redis, RENEW, &keys, &[ONE, TTL].repeat(7));
    let wanted = [
        "done", "missing", "taken", "taken", "refused", "done", "done",
    ];
    assert_eq!(ends(&together), wanted);
    assert_eq!(together[2].text(), value(TWO));
    settled();
    prepare();
    let alone = keys.map(|key| call(&mut redis, RENEW, &[key], &[ONE, TTL]).remove(0));
    assert_eq!(alone.to_vec(), together, "one by one as all at once");
    settled();
}

#[test]
fn without_memory_nothing_is_granted_and_what_is_held_lives_and_leaves() {
    let server = server();
    let mut redis = connect(&server);
    let held = acquire(&mut redis, &["own", "own2"]);
    assert_eq!(kinds(&held), ["granted", "granted"]);
    let counter = ask(&server, &["GET", FENCE]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);

    for keys in [&["new"][..], &["new", "own", "new2"]] {
        let out = acquire(&mut redis, keys);
        assert!(out[0].text().starts_with("OOM"), "{out:?}");
        assert!(!kinds(&out).contains(&"granted"), "{out:?}");
    }
    assert_eq!(ask(&server, &["EXISTS", "new", "new2"]), Reply::Int(0));
    assert_eq!(ask(&server, &["GET", FENCE]), counter);

    let renewed = call(
        &mut redis,
        RENEW,
        &["own", "own2"],
        &[ONE, "90000"].repeat(2),
    );
    assert_eq!(ends(&renewed), ["done", "done"]);
    assert!(ask(&server, &["PTTL", "own"]).as_int() > Some(60_000));
    let released = call(&mut redis, RELEASE, &["own", "own2"], &[ONE, ONE]);
    assert_eq!(ends(&released), ["done", "done"]);
}

/// The comment lines that a script begins with, and the code behind them.
fn halves(script: &str) -> (String, String) {
    let header = script.lines().take_while(|line| line.starts_with("--"));
    let code = script.lines().skip_while(|line| line.starts_with("--"));
    (
        header.collect::<Vec<_>>().join("\n"),
        code.collect::<Vec<_>>().join("\n"),
    )
}

/// What the header says under `title`, up to the next title.
#[track_caller]
fn section<'a>(header: &'a str, title: &str) -> &'a str {
    let start = format!("-- {title}: ");
    let from = header
        .find(&start)
        .unwrap_or_else(|| panic!("no {title}: {header}"));
    let text = &header[from + start.len()..];
    let titles = ["KEYS", "ARGV", "Returns"].map(|title| text.find(&format!("-- {title}: ")));
    &text[..titles.into_iter().flatten().min().unwrap_or(text.len())]
}

#[test]
fn headers_agree_with_the_code_below_them() {
    let server = server();
    let mut redis = connect(&server);
    for (name, script) in [("acquire", ACQUIRE), ("release", RELEASE), ("renew", RENEW)] {
        let (header, code) = halves(script);
        for title in ["Purpose", "KEYS", "ARGV", "Returns"] {
            assert!(!section(&header, title).is_empty(), "{name}: {title}");
        }
        let promised = section(&header, "Returns");
        for made in code.split("{ err = '").skip(1) {
            let word = made.split(' ').next().unwrap();
            assert!(word == "ERR" || promised.contains(word), "{name}: {word}");
        }

        // Called in the shape that the header draws, it answers in the shape that it promises.
        let (keys, args) = (section(&header, "KEYS"), section(&header, "ARGV"));
        let fixed_keys = keys.matches("[1] ").count();
        let fixed_args = args.matches("[1] ").count();
        let (_, each) = args.split_once("for each lock key: ").unwrap();
        let per_key = if each.contains("ttl in ms") {
            vec![ONE, TTL]
        } else {
            vec![ONE]
        };
        assert_eq!(
            each.trim().split(", ").count(),
            per_key.len(),
            "{name}: {each}"
        );
        let names: Vec<String> = (0..7).map(|n| format!("shape:{name}:{n}")).collect();
        for n in [1, 2, 7] {
            let mut all_keys = vec![FENCE; fixed_keys];
            all_keys.extend(names[..n].iter().map(String::as_str));
            let mut all_args = vec!["host/1/0"; fixed_args];
            all_args.extend(per_key.repeat(n));
            let out = call(&mut redis, script, &all_keys, &all_args);
            assert_eq!(out.len(), n, "{name}");
            let said = if name == "acquire" {
                kinds(&out)
            } else {
                ends(&out)
            };
            assert!(!said.contains(&"refused"), "{name}: {out:?}");
        }
    }
}

#[test]
fn scripts_take_time_from_redis_and_touch_declared_keys_only() {
    for script in [ACQUIRE, RELEASE, RENEW] {
        let (_, code) = halves(script);
        for line in code.lines() {
            let Some((_, call)) = line
                .split_once("redis.call(")
                .or(line.split_once("redis.pcall("))
            else {
                continue;
            };
            let args: Vec<&str> = call.split([',', ')']).map(str::trim).collect();
            let declared = ["key", "counter", "KEYS[i + 1]"];
            let fine = args[0] == "'TIME'" || declared.contains(&args[1]);
            assert!(fine, "{line}");
        }
        assert!(!code.contains("os."), "no clock but that of Redis");
    }
}
