//! Compares the headers of the scripts with the code below them.

use super::parts::PARTS;
use super::{
    ACQUIRE, ADOPT, CLAIM, CONVERT, DATA, FENCE, HOLD, INSPECT, MICROS, ONE, PROBE, PROPOSE, READ,
    RELEASE, RENEW, Said, TTL, TWO, WRITE, call, connect, ends, kinds, value,
};
use super::{redisson, signals};
use crate::support::{ask, server};

/// All scripts with their parts, and each part alone.
fn all() -> Vec<(&'static str, &'static str)> {
    let scripts: [(&str, &str); 18] = [
        ("acquire", &ACQUIRE),
        ("release", &RELEASE),
        ("release_with_signal", &signals::RELEASE),
        ("renew", &RENEW),
        ("adopt", &ADOPT),
        ("convert", &CONVERT),
        ("inspect", &INSPECT),
        ("write", &WRITE),
        ("read", &READ),
        ("claim", &CLAIM),
        ("propose", &PROPOSE),
        ("hold", &HOLD),
        ("data", &DATA),
        ("probe", &PROBE),
        ("redisson_acquire", &redisson::ACQUIRE),
        ("redisson_renew", &redisson::RENEW),
        ("redisson_release", &redisson::RELEASE),
        ("redisson_inspect", &redisson::INSPECT),
    ];
    scripts.into_iter().chain(PARTS).collect()
}

/// The comment lines at the top of a script, and the code below them.
pub(super) fn halves(script: &str) -> (String, String) {
    let header = script.lines().take_while(|line| line.starts_with("--"));
    let code = script.lines().skip_while(|line| line.starts_with("--"));
    (
        header.collect::<Vec<_>>().join("\n"),
        code.collect::<Vec<_>>().join("\n"),
    )
}

/// The text of the header under `title`, up to the next title.
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
fn headers_name_every_part_and_every_error() {
    for (name, script) in all() {
        let (header, code) = halves(script);
        for title in ["Purpose", "KEYS", "ARGV", "Returns"] {
            assert!(!section(&header, title).is_empty(), "{name}: {title}");
        }
        let promised = section(&header, "Returns");
        for made in code.split("{ err = '").skip(1) {
            let word = made.split(' ').next().unwrap();
            assert!(word == "ERR" || promised.contains(word), "{name}: {word}");
        }
    }
}

/// The replies for one lock key without a value, and for several: one reply for each key.
#[test]
fn scripts_answer_each_key_as_documented() {
    let server = server();
    let mut redis = connect(&server);
    let token = "00000000000000000017";
    for (script, fixed_args, per_key, absent) in [
        (&**RELEASE, &[][..], &[&*format!("{ONE}!host/2/0")][..], 0),
        (&ADOPT, &["host/2/0"], &[ONE, MICROS, TWO, TTL], 0),
        (&ADOPT, &["host/2/0"], &[ONE, MICROS, TWO, ""], 0),
        (&CONVERT, &["host/2/0"], &[ONE, TWO, TTL, ""], 0),
        (&CONVERT, &["host/2/0"], &[ONE, TWO, TTL, "r"], 0),
        (&INSPECT, &[], &[], 0),
        (&WRITE, &[], &[token, "", "text"], 1),
        (&WRITE, &[], &[token, "-5000", ""], 1),
        (&READ, &["1000"], &[], 0),
    ] {
        let fixed_keys: &[&str] = if script == *RELEASE { &[FENCE] } else { &[] };
        for n in [1, 2, 7] {
            ask(&server, &["FLUSHALL"]);
            let names: Vec<String> = (0..n).map(|n| format!("k{n}")).collect();
            let mut keys = fixed_keys.to_vec();
            keys.extend(names.iter().map(String::as_str));
            let args = [fixed_args, &per_key.repeat(n)].concat();
            let said = call(&mut redis, script, &keys, &args);
            assert_eq!(said, vec![Said::Number(absent); n], "{script}");
        }
    }
}

#[test]
fn headers_agree_with_the_code_below_them() {
    let server = server();
    let mut redis = connect(&server);
    for (name, script) in [
        ("acquire", &**ACQUIRE),
        ("release", &RELEASE),
        ("renew", &RENEW),
    ] {
        let (header, _) = halves(script);
        // Called as its header says, each script replies as its header says.
        let (keys, args) = (section(&header, "KEYS"), section(&header, "ARGV"));
        let fixed_keys = keys.matches("[1] ").count();
        let fixed_args = args.matches("[1] ").count();
        let (_, each) = args.split_once("for each lock key: ").unwrap();
        // The words before the colon name the arguments, and their descriptions follow.
        let (words, modes) = each.split_once(':').unwrap_or((each, ""));
        for (mode, called) in [
            ("", "empty:"),
            ("-", "`-`:"),
            ("0", "`0`:"),
            ("+", "`+`:"),
            ("+1795263780943818", "`0` or `+` and µs:"),
            ("01795263780943818", "`0` or `+` and µs:"),
        ] {
            let argument = |word: &str| match word.trim_start_matches("and ") {
                "lease id" => ONE,
                "ttl in ms" => TTL,
                "its queue mode" if modes.contains(called) => mode,
                other => panic!("{name}: no argument for {other:?} ({called})"),
            };
            let per_key: Vec<&str> = words.trim().split(", ").map(argument).collect();
            let names: Vec<String> = (0..7).map(|n| format!("{name}:{mode}:{n}")).collect();
            ask(&server, &["SET", &names[1], &value(TWO), "PX", TTL]);
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
                // A caller joins where the header says so.
                if name == "acquire" && n > 1 {
                    let joins = modes.contains(called) && !["", "-"].contains(&mode);
                    let wanted = if joins { "queued" } else { "contended" };
                    assert_eq!(said[1], wanted, "{mode:?}: {out:?}");
                }
            }
        }
    }
}

/// The header of release.lua lists each form in which the caller may name a lease.
#[test]
fn release_names_each_form_of_a_lease() {
    let (header, _) = halves(&RELEASE);
    let args = section(&header, "ARGV");
    for form in [
        "`lh1 <lease id> <µs> <holder>`",
        "`<lease id>!<holder>`",
        "`<lease id>,<ttl in ms><mode>,<holder>`",
        "`keep <µs> <ms> `",
    ] {
        let args = args.replace("\n--   ", " ");
        assert!(args.contains(form), "{form:?} in {args}");
    }
}

/// The Redis calls that use anything but the clock, the library's channels and declared keys.
fn undeclared(code: &str) -> Vec<&str> {
    let calls = code
        .split("redis.")
        .filter_map(|rest| rest.strip_prefix("call(").or(rest.strip_prefix("pcall(")));
    let fine = |call: &&str| {
        let mut args = call.split([',', ')']).map(str::trim);
        let (command, first) = (args.next().unwrap(), args.next().unwrap());
        match command {
            "'TIME'" => true,
            "'INFO'" => first == "'server'",
            "'PUBLISH'" => ["channel", "channel .. ':' .. waiter"].contains(&first),
            // A node refuses a shard channel of another slot than its own.
            "'SPUBLISH'" => ["shard .. holder", "channel"].contains(&first),
            "'PUBSUB'" => {
                let channel = match first {
                    "'NUMSUB'" => "channel",
                    _ => "shard .. holder",
                };
                ["'NUMSUB'", "'SHARDNUMSUB'"].contains(&first) && args.next() == Some(channel)
            }
            "'MGET'" => first == "unpack(KEYS",
            // The keys of a set.
            "'DEL'" if first == "unpack(KEYS" => true,
            "'DEL'" | "'LPUSH'" | "'PEXPIRE'" if first == "signal" => {
                code.contains("local signal = all[2 * count + 1 + i]")
            }
            "'EXISTS'" if first == "all[i + 1]" => code.contains("local all, count = KEYS, "),
            "'DEL'" if first == "unpack(gone" => {
                code.contains("gone[#gone + 1], gone_at[#gone + 1] = KEYS[i + 1], i")
            }
            // All waiters that are left were silent.
            "'DEL'" if first == "queue" => code.contains("table.insert(hinted, 1, first[1])"),
            "'SET'" | "'DEL'" | "'APPEND'" | "'HGET'" | "'HSET'" => {
                ["key", "value_key", "mark", "KEYS[2]", "KEYS[i + 1]"].contains(&first)
            }
            "'HSTRLEN'" | "'HDEL'" | "'SETRANGE'" => first == "key",
            // A lock of Redisson has one field.
            "'HEXISTS'" | "'HLEN'" => first == "key",
            "'HKEYS'" => {
                first == "key"
                    && code.contains("redis.pcall('HLEN', key) == 1 and redis.pcall('HKEYS', key)")
            }
            "'INCR'" | "'GET'" => first == "counter",
            "'LINDEX'" => first == "queue",
            // Reads up to a length.
            "'GETRANGE'" => {
                ["key", "mark", "KEYS[2]"].contains(&first) && args.next() == Some("'0'")
            }
            "'TYPE'" => ["key", "counter"].contains(&first),
            "'PTTL'" | "'PEXPIRE'" => ["key", "queue"].contains(&first),
            "'EXISTS'" | "'PEXPIRETIME'" | "'PEXPIREAT'" => first == "key",
            // Shares are added by `GT`, and changed by `XX`.
            "'ZADD'" if first == "key" => ["'GT'", "'XX'"].contains(&args.next().unwrap()),
            "'ZADD'" => ["queue", "counter"].contains(&first),
            "'ZSCORE'" => ["key", "queue", "counter"].contains(&first),
            "'ZCARD'" | "'ZRANGE'" | "'ZCOUNT'" => ["key", "queue"].contains(&first),
            "'ZPOPMIN'" | "'ZRANK'" => first == "queue",
            "'ZREM'" => ["key", "queue", "KEYS[i + 1]"].contains(&first),
            _ => false,
        }
    };
    calls.filter(|call| !fine(call)).collect()
}

#[test]
fn scripts_take_time_from_redis_and_touch_declared_keys_only() {
    for (name, script) in all() {
        let (_, code) = halves(script);
        assert_eq!(undeclared(&code), [""; 0], "{name}");
        for line in code.lines().map(str::trim_start) {
            let declared = ["local key", "local counter", "local mark,"];
            let named = declared.iter().any(|start| line.starts_with(start));
            assert!(!named || line.contains(" = KEYS["), "{line}");
            let queue = line.starts_with("local queue =") || line.starts_with("queue =");
            let declared = [" = nil", " = KEYS["]
                .iter()
                .any(|from| line.contains(from));
            assert!(!queue || declared, "{line}");
            let channel = line.starts_with("local channel");
            let named = [
                " = string.sub(counter, 1, string.find(counter, '~', 1, true)) .. 'to:' .. ",
                " = 'redisson_lock__channel:' .. (string.find(key, '{', 1, true) and key or '{' .. key .. '}')",
            ];
            assert!(
                !channel || named.iter().any(|text| line.contains(text)),
                "{line}"
            );
            // A function is given declared keys, too.
            for (call, keys) in [
                ("serve(", &["key, queue, micros"][..]),
                (
                    "join_or_confirm(",
                    &["key, lease, ttl, mode, asked, queue, waiting)"],
                ),
                ("look(", &["key)", "key, "]),
                ("end_late(", &["key, set, is_called, ends)"]),
                ("roll_call_end(", &["key)"]),
                ("first_silent(", &["key, queue)"]),
                ("look_at_newest(", &["key, set)"]),
                ("wait_for(", &["key, share, set)"]),
                ("give(", &["key, share, lease, holder, ttl, set"]),
            ] {
                let mut given = line.split(call).skip(1);
                let fine = given.all(|args| keys.iter().any(|keys| args.starts_with(keys)));
                assert!(fine, "{line}");
            }
        }
        assert!(!code.contains("os."), "no clock but that of Redis");
    }
    for bad in [
        "redis.call('GETRANGE', other, '0', last)",
        "redis.call('GET', key)",
        "x = redis.pcall('SET', key, 1) or redis.pcall('DEL', value)",
        "redis.pcall('APPEND', 'x', key)",
        "redis.pcall('PUBLISH', key, 'text')",
        "redis.pcall('MGET', key, other)",
        "redis.pcall(command, key)",
        "redis.pcall('ZADD', key, 1, 'entry')",
        "redis.pcall('ZREM', KEYS[i], 'entry')",
        "redis.pcall('DEL', queue)",
        "redis.pcall('ZUNIONSTORE', queue, 1, other)",
    ] {
        assert_eq!(undeclared(bad).len(), 1, "{bad}");
    }
}
