//! Tests of the encoding of calls, and of the decoding of replies.

use redis::Value;

use super::*;
use crate::command::QueueMode;
use crate::command::encoder::decimal;
use crate::command::{Acquire, Held, Mode, Release, Reply};
use crate::command::{
    Command, Foreign, SCRIPTS, acquire, adopt, claim, fenced, inspect, release, renew, value, vote,
};
use crate::config::key::{Key, KeyLayout};
use crate::report::error::ErrorKind;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::slot::Slot;

/// Decodes a reply for a client without another library.
fn decode(script: &Script, n: usize, reply: Value, prefix: &str) -> Decoded {
    super::decode(script, n, reply, prefix, None)
}

fn context() -> ScriptContext {
    ScriptContext::new(
        HolderId::of_this_process(),
        "p:",
        KeyLayout::Single,
        1 << 20,
    )
}

#[test]
fn refused_deletes_are_tried_again_after_ten_minutes() {
    let context = context();
    let now = MonotonicTime::now();
    assert!(context.plain_releases.allow(now));
    context.plain_releases.refuse(now);
    let later = |secs| now.after(Duration::from_secs(secs));
    assert!(!context.plain_releases.allow(later(599)));
    assert!(context.plain_releases.allow(later(601)));
    assert!(
        context.plain_acquires.allow(now),
        "acquires need other rights"
    );
}

#[test]
fn a_script_call_is_encoded_as_resp() {
    let key = Key::new("p:", "a", 10).unwrap();
    let lease = LeaseId::random();
    let until = MonotonicTime::now();
    let command = Command::Release(Release::unheld(key, lease, until));
    let mut buffer = Vec::new();
    let call = ScriptRef::Text("return 1");
    encode(
        &mut buffer,
        call,
        &release::SCRIPT,
        &context(),
        [&command].into_iter(),
    );
    let wanted = format!(
        "*7\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n3\r\n$8\r\np:~fence\r\n$3\r\np:a\r\n\
         $10\r\np:~queue:a\r\n$32\r\n{lease}\r\n"
    );
    assert_eq!(String::from_utf8(buffer).unwrap(), wanted);
}

/// With this argument, lua/release.lua needs one comparison.
#[test]
fn a_release_of_a_grant_sends_the_whole_value() {
    let context = context();
    let lease = LeaseId::random();
    let micros = 1_795_263_780_943_818;
    let release = Command::Release(Release {
        min_hold: Duration::ZERO,
        mode: Mode::Exclusive,
        key: Key::new("p:", "a", 10).unwrap(),
        lease,
        until: MonotonicTime::now(),
        // Two hand-offs within the client do not change the value.
        held: Some(Held {
            token: (micros << 10) + 2,
            is_token_in_value: true,
            others_queued: false,
            valid_until: MonotonicTime::at_tick(0),
        }),
        queued: None,
    });
    let value = value::format(lease, micros, &context.holder, None, false);
    assert_eq!(words(&context, &[release]).pop(), Some(value));
}

/// A hold sets a missing key, so a release of its lease comes after it. An acquire or a proposal comes after the
/// release of another lease.
#[test]
fn holds_come_before_releases_and_grants_after() {
    let at = |kind| SCRIPTS.iter().position(|one| *one == kind);
    assert!(at(&vote::HOLD) < at(&release::SCRIPT));
    assert!(at(&release::SCRIPT) < at(&acquire::SCRIPT));
    assert!(at(&release::SCRIPT) < at(&vote::PROPOSE));
}

/// The words of a call, as Redis reads them.
fn words(context: &ScriptContext, commands: &[Command]) -> Vec<String> {
    let mut buffer = Vec::new();
    let kind = commands[0].script().unwrap();
    let call = ScriptRef::Text("return 1");
    encode(&mut buffer, call, kind, context, commands.iter());
    // A command has the form of a reply, so the parser of replies can read it.
    let Ok(Value::Array(words)) = redis::parse_redis_value(&buffer) else {
        panic!("no command: {}", String::from_utf8_lossy(&buffer));
    };
    let text = |word| redis::from_redis_value::<String>(word).unwrap();
    words.into_iter().map(text).collect()
}

/// On a Cluster, all keys of a call share the slot of its lock.
#[test]
fn a_call_on_a_cluster_names_keys_of_one_slot_and_the_shard_channel() {
    let lease = LeaseId::decode(&"1".repeat(LeaseId::DIGITS)).unwrap();
    let (ttl, key) = (
        std::time::Duration::from_secs(5),
        Key::new("p:", "a", 10).unwrap(),
    );
    let acquire = |queue_mode| {
        Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            ttl,
            queue_mode,
            link: crate::command::Link::Alone,
            replicas: None,
        })
    };
    let release = Command::Release(Release::unheld(key.clone(), lease, MonotonicTime::now()));
    let tag = key.slot().tag();
    let (counter, queue) = (format!("p:~fence{tag}"), format!("p:~queue{tag}:a"));
    let lease = lease.to_string();
    let context = |layout, prefix| {
        let holder = HolderId::of_text("host/1/a");
        ScriptContext::new(holder, prefix, layout, 1 << 20)
    };
    let cluster = context(KeyLayout::Slots, "p:");
    let head = ["EVAL", "return 1"];
    for (shard_slot, shard) in [(None, None), (Slot::new(0), Slot::new(0).map(Slot::tag))] {
        cluster.set_shard_slot(shard_slot);
        let shard = shard.map(|tag| format!("p:~to:{tag}"));
        for (command, keys, args) in [
            (
                acquire(QueueMode::None),
                vec![],
                vec!["host/1/a", &lease, "5000", ""],
            ),
            (
                acquire(QueueMode::Notified),
                vec![&queue],
                vec!["host/1/a", &lease, "5000", "+"],
            ),
            (release.clone(), vec![&queue], vec![&*lease]),
        ] {
            let number = (2 + keys.len()).to_string();
            let mut wanted = [&head[..], &[&number, &counter, "p:a"]].concat();
            wanted.extend(keys.iter().map(|key| key.as_str()));
            wanted.extend(&args);
            let waits = !keys.is_empty();
            if let Some(shard) = shard.as_deref().filter(|_| waits) {
                wanted.push(shard);
            }
            assert_eq!(words(&cluster, &[command]), wanted);
        }
    }
    // With a tag in the prefix, all keys and the channel have the names that they have on one server.
    let one_slot = context(KeyLayout::OneSlot, "{p}:");
    one_slot.set_shard_slot(Some(key.slot()));
    let key = Key::new("{p}:", "a", 10).unwrap();
    let release = Command::Release(Release::unheld(
        key,
        LeaseId::decode(&lease).unwrap(),
        MonotonicTime::now(),
    ));
    let wanted = [
        "3",
        "{p}:~fence",
        "{p}:a",
        "{p}:~queue:a",
        &lease,
        "{p}:~to:",
    ];
    assert_eq!(words(&one_slot, &[release])[2..], wanted);
}

#[test]
fn numbers_are_written_in_decimal() {
    for number in [0, 7, 10, 30_000, u64::MAX] {
        let (digits, start) = decimal(number);
        assert_eq!(&digits[start..], number.to_string().as_bytes());
    }
}

#[test]
fn only_reads_may_reply_that_a_string_is_too_large() {
    let too_large = || parsed("-TOOLARGE a string of 9 bytes\r\n");
    for kind in SCRIPTS {
        let reads = kind == &fenced::READ || kind == &claim::SCRIPT;
        for (n, reply) in [
            (1, too_large()),
            (2, Value::Array(vec![too_large(), too_large()])),
        ] {
            match decode(kind, n, reply, "p:") {
                Decoded::Unexpected(error) => {
                    assert!(!reads, "{kind:?}");
                    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                }
                Decoded::Outcomes(mut outcomes) => {
                    assert!(reads, "{kind:?}");
                    let error = outcomes.pop().unwrap().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
                }
                _ => panic!("{kind:?}: neither"),
            }
        }
    }
}

#[test]
fn a_reply_of_the_wrong_type_is_unexpected() {
    for (script, value) in [
        (&acquire::SCRIPT, Value::Okay),
        (&acquire::SCRIPT, Value::Array(vec![Value::Int(1)])),
        (&release::SCRIPT, Value::Nil),
    ] {
        let decoded = decode(script, 1, value, "p:");
        assert!(matches!(decoded, Decoded::Unexpected(_)));
    }
    let short = Value::Array(vec![Value::Int(1)]);
    assert!(matches!(
        decode(&release::SCRIPT, 2, short, "p:"),
        Decoded::Unexpected(_)
    ));
    for (kind, one_for_two) in [
        (&release::SCRIPT, 0),
        (&acquire::SCRIPT, 1),
        (&adopt::SCRIPT, 1),
        (&fenced::WRITE, 1),
    ] {
        let decoded = decode(kind, 2, Value::Int(one_for_two), "p:");
        assert!(matches!(decoded, Decoded::Unexpected(_)), "{kind:?}");
    }
}

#[test]
fn one_result_stands_for_a_whole_batch() {
    let outcomes = |kind, value| match decode(kind, 3, value, "p:") {
        Decoded::Outcomes(outcomes) => outcomes.into_iter().map(Result::unwrap).collect(),
        _ => Vec::new(),
    };
    for kind in [&release::SCRIPT, &renew::SCRIPT] {
        assert_eq!(outcomes(kind, Value::Int(1)), vec![Reply::Done; 3]);
    }
    let micros = [0, 1, 2].map(|n| (1_700_000_000_000_000_u64 + n).to_string());
    let granted = [&micros[0], &micros[1], &micros[2]].map(|micros| Reply::Granted {
        is_token_in_value: true,
        token: value::token(micros).unwrap(),
    });
    let first = Value::BulkString(micros[0].clone().into_bytes());
    assert_eq!(outcomes(&acquire::SCRIPT, first), granted);
}

#[test]
fn no_token_follows_the_greatest_one() {
    let last = || Value::BulkString(b"18014398509481983".to_vec());
    assert!(matches!(
        decode(&acquire::SCRIPT, 1, last(), "p:"),
        Decoded::Outcomes(_)
    ));
    assert!(matches!(
        decode(&acquire::SCRIPT, 2, last(), "p:"),
        Decoded::Unexpected(_)
    ));
}

fn parsed(wire: &str) -> Value {
    redis::parse_redis_value(wire.as_bytes()).unwrap()
}

#[test]
fn script_errors_of_all_versions_are_read() {
    for wire in [
        "-OOM command not allowed\r\n",
        "-@user_script: 18: -OOM command not allowed\r\n",
    ] {
        let Decoded::Outcomes(outcomes) = decode(&acquire::SCRIPT, 1, parsed(wire), "p:") else {
            panic!("{wire}");
        };
        let error = outcomes[0].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

#[test]
fn a_denied_command_in_a_script_is_denied() {
    for wire in [
        "-@user_script: 1: The user executing the script can't run this command or subcommand\r\n",
        "-ERR The user executing the script can't run this command or subcommand\r\n",
        "-ERR ACL failure in script: User x has no permissions to run the 'set' command\r\n",
    ] {
        let Decoded::Outcomes(outcomes) = decode(&acquire::SCRIPT, 2, parsed(wire), "p:") else {
            panic!("{wire}");
        };
        let kinds = outcomes.into_iter().map(|one| one.unwrap_err().kind());
        assert_eq!(kinds.collect::<Vec<_>>(), [ErrorKind::Denied; 2], "{wire}");
    }
}

#[test]
fn an_unreadable_result_is_an_error_of_its_key() {
    for (kind, found) in [
        (&fenced::WRITE, "18446744073709551616"),
        (&fenced::WRITE, ""),
        (&acquire::SCRIPT, "not a number"),
        (&acquire::SCRIPT, "18014398509481984"),
    ] {
        let results = [Value::BulkString(found.into()), Value::Int(1)];
        let Decoded::Outcomes(outcomes) = decode(kind, 2, Value::Array(results.to_vec()), "p:")
        else {
            panic!("{kind:?}: {found:?}");
        };
        let error = outcomes[0].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        let text = error.to_string();
        assert!(found.is_empty() || !text.contains(found), "{text}");
        assert!(outcomes[1].is_ok());
    }
    let endless = Value::BulkString(vec![0xff; 1 << 20]);
    let Decoded::Outcomes(outcomes) = decode(&fenced::WRITE, 1, endless, "p:") else {
        panic!("one outcome");
    };
    let error = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(error.len() < 2000, "{}", error.len());
    // One result for a whole batch never contains another user's value, so this reply is unexpected.
    let one_for_two = decode(
        &acquire::SCRIPT,
        2,
        Value::BulkString(b"not a number".into()),
        "p:",
    );
    assert!(matches!(one_for_two, Decoded::Unexpected(_)));
}

#[test]
fn a_foreign_key_is_an_error_or_another_librarys_lock() {
    let plain_keys = Some(OtherLibrary::PlainKeys);
    let outcome = |script, detail, other| {
        let reply = parsed(&format!("-FOREIGN {detail}\r\n"));
        match super::decode(script, 1, reply, "p:", other) {
            Decoded::Outcomes(mut outcomes) => outcomes.remove(0),
            _ => panic!("{detail}"),
        }
    };
    let ms = Duration::from_millis;
    for (detail, redis_type, expires_in, mark, shown) in [
        (
            "string 4711 0a1b2c3d",
            "string",
            Some(ms(4711)),
            0x0a1b_2c3d,
            "but a string",
        ),
        ("zset -1 0", "zset", None, 0, "but a zset"),
        ("hash", "hash", None, 0, "but a hash"),
        (
            "other 7 0",
            "other",
            Some(ms(7)),
            0,
            "but a value of another type",
        ),
        (
            "ReJSON-RL 7 0",
            "other",
            Some(ms(7)),
            0,
            "but a value of another type",
        ),
        ("", "other", None, 0, "but a value of another type"),
    ] {
        for script in [&acquire::SCRIPT, &inspect::SCRIPT] {
            let found = Foreign {
                redis_type,
                expires_in,
                mark,
            };
            assert_eq!(
                outcome(script, detail, plain_keys).unwrap(),
                Reply::Foreign(found)
            );
            let error = outcome(script, detail, None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol);
            let text = error.to_string();
            assert!(text.contains(shown), "{text}");
            assert!(text.contains("Builder::compatible_with"), "{text}");
        }
        // A renewal or a release of a lock that was overwritten.
        let lost = outcome(&renew::SCRIPT, detail, plain_keys).unwrap();
        assert_eq!(lost, Reply::Taken { by: None });
    }
}

#[test]
fn a_release_beside_python_names_the_signals() {
    let mut context = context();
    context.other_library = Some(OtherLibrary::PythonRedisLock);
    let script = context.script(&release::SCRIPT);
    assert_eq!(context.script(&acquire::SCRIPT), &acquire::SCRIPT);
    let keys = ["lock:a", "lock:app:b"].map(|key| Key::from_full("lock:", key).unwrap());
    let releases = keys.map(|key| {
        Command::Release(Release::unheld(
            key,
            LeaseId::random(),
            MonotonicTime::now(),
        ))
    });
    let mut buffer = Vec::new();
    let call = ScriptRef::Hash(script.hash());
    encode(&mut buffer, call, script, &context, releases.iter());
    let Ok(Value::Array(words)) = redis::parse_redis_value(&buffer) else {
        panic!("no command: {}", String::from_utf8_lossy(&buffer));
    };
    let words: Vec<String> = words
        .into_iter()
        .map(|word| redis::from_redis_value(word).unwrap())
        .collect();
    assert_eq!(words[0], "EVALSHA");
    assert_ne!(words[1], release::SCRIPT.hash());
    let wanted = [
        "7",
        "p:~fence",
        "lock:a",
        "lock:app:b",
        "lock:~queue:a",
        "lock:~queue:app:b",
        "lock-signal:a",
        "lock-signal:app:b",
    ];
    assert_eq!(words[2..10], wanted);
    assert_eq!(words.len(), 12, "two leases");
}

#[test]
fn one_readonly_in_a_batch_shows_a_replica() {
    let refusal = "-READONLY You can't write against a read only replica.\r\n";
    for wire in [format!("*2\r\n:0\r\n{refusal}"), refusal.to_owned()] {
        assert!(is_refused_by_non_primary(&parsed(&wire)), "{wire}");
    }
}

#[test]
fn an_error_of_a_proxy_leaves_the_outcome_unknown() {
    let decoded = decode(&acquire::SCRIPT, 1, parsed("-upstream failure\r\n"), "p:");
    assert!(matches!(decoded, Decoded::OutcomeUnknown(_)));
}

#[test]
fn a_batch_refused_for_one_key_is_split() {
    let refused = || parsed("-NOPERM No permissions to access a key\r\n");
    assert!(matches!(
        decode(&acquire::SCRIPT, 2, refused(), "p:"),
        Decoded::SplitBatch
    ));
    assert!(matches!(
        decode(&acquire::SCRIPT, 1, refused(), "p:"),
        Decoded::Outcomes(_)
    ));
}

#[test]
fn a_batch_of_a_moving_slot_is_split_if_each_command_has_one_key() {
    for refusal in ["-TRYAGAIN Multiple keys\r\n", "-ASK 7 h:1\r\n"] {
        let is_split =
            |kind, n| matches!(decode(kind, n, parsed(refusal), "p:"), Decoded::SplitBatch);
        assert!(is_split(&renew::SCRIPT, 2), "{refusal}");
        assert!(!is_split(&renew::SCRIPT, 1), "{refusal}");
        // Each part of a split call would have several keys, too: the fence counter, the lock's key and its queue.
        assert!(!is_split(&acquire::SCRIPT, 2), "{refusal}");
        assert!(!is_split(&release::SCRIPT, 2), "{refusal}");
    }
}

mod fuzz {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use redis::{PushKind, VerbatimFormat};

    use super::*;
    use crate::util::fuzz;
    use crate::util::fuzz::Bytes;

    /// A text that a script returns (the µs part of a token, a value, a result of lua/inspect.lua), or any bytes.
    fn text() -> impl Strategy<Value = Bytes> {
        let holder = "[a-z.-]{0,64}/[0-9]{1,7}/[0-9a-f]{8}( \\+)?";
        let reply = (
            fuzz::lease(),
            "(-?[0-9]{1,20} [0-9]{1,20} )?",
            "[0-9]{16}",
            holder,
        );
        let reply = reply.prop_map(|(lease, before, micros, holder)| {
            format!("{before}lh1 {} {micros} {holder}", fuzz::lease_text(lease))
        });
        let micros = any::<u64>().prop_map(|micros| micros.to_string());
        let greatest = select(vec!["18014398509481983", "18014398509481984"]);
        fuzz::bytes_like(prop_oneof![reply, micros, greatest.prop_map(str::to_owned)])
    }

    fn error() -> impl Strategy<Value = Value> {
        let code = "(ERR|NOSCRIPT|NOPERM|CROSSSLOT|WRONGTYPE|FOREIGN|TOOLARGE|READONLY|[A-Z]{1,9}|[a-z@_: -]{1,30})";
        (code, ".{0,600}").prop_map(|(code, detail)| {
            let line = format!("-{code} {}\r\n", detail.replace(['\r', '\n'], " "));
            redis::parse_redis_value(line.as_bytes()).unwrap_or(Value::Nil)
        })
    }

    fn reply() -> impl Strategy<Value = Value> {
        let string = || text().prop_map(|bytes| String::from_utf8_lossy(&bytes.0).into_owned());
        let leaf = prop_oneof![
            4 => text().prop_map(|bytes| Value::BulkString(bytes.0)),
            // The greatest µs part that a token has room for.
            1 => Just(Value::BulkString(b"18014398509481983".to_vec())),
            2 => prop_oneof![-3..3_i64, any::<i64>()].prop_map(Value::Int),
            2 => error(),
            1 => string().prop_map(Value::SimpleString),
            1 => prop_oneof![Just(Value::Nil), Just(Value::Okay)],
            1 => any::<f64>().prop_map(Value::Double),
            1 => any::<bool>().prop_map(Value::Boolean),
            1 => string().prop_map(|text| Value::VerbatimString { format: VerbatimFormat::Text, text }),
        ];
        leaf.prop_recursive(3, 24, 5, |inner| {
            prop_oneof![
                4 => vec(inner.clone(), 0..5).prop_map(Value::Array),
                1 => vec(inner.clone(), 0..5).prop_map(Value::Set),
                1 => vec((inner.clone(), inner.clone()), 0..3).prop_map(Value::Map),
                1 => vec(inner, 0..3).prop_map(|data| Value::Push { kind: PushKind::Message, data }),
            ]
        })
    }

    fn short(error: &crate::report::error::Error) -> Result<(), TestCaseError> {
        let message = error.to_string();
        prop_assert!(
            message.len() <= 2000,
            "{} bytes: {message:.200}",
            message.len()
        );
        Ok(())
    }

    proptest! {
        #[test]
        fn fuzz_any_reply_gives_each_command_an_outcome(
            kind in select(&SCRIPTS[..]),
            n in 1..4_usize,
            reply in reply(),
        ) {
            match decode(kind, n, reply, "p:") {
                Decoded::Outcomes(outcomes) => {
                    prop_assert_eq!(outcomes.len(), n);
                    for outcome in &outcomes {
                        if let Err(error) = outcome {
                            short(error)?;
                        }
                    }
                }
                Decoded::OutcomeUnknown(error) | Decoded::Unexpected(error) => short(&error)?,
                Decoded::SplitBatch | Decoded::NoScript { .. } => {}
            }
        }
    }
}
