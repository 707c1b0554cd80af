//! The scripts for Redisson's locks, on keys of leases, of Redisson, and of other programs.

use std::sync::LazyLock;

use leasehold_testbed::{Reply, Server};
use redis::{Connection, Value};

use super::parts::whole;
use super::{ONE, Said, TTL, TWO, connect, own_words, say, ttl_of};
use crate::support::{ask, server};

type Script = LazyLock<String>;
pub(super) static ACQUIRE: Script =
    Script::new(|| whole(include_str!("../../../lua/redisson_acquire.lua")));
pub(super) static RENEW: Script =
    Script::new(|| whole(include_str!("../../../lua/redisson_renew.lua")));
pub(super) static RELEASE: Script =
    Script::new(|| whole(include_str!("../../../lua/redisson_release.lua")));
pub(super) static INSPECT: Script =
    Script::new(|| whole(include_str!("../../../lua/redisson_inspect.lua")));

/// The field of a thread of Redisson.
const OF_JAVA: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:31";

/// The field of a lease of this library.
fn field(lease: &str) -> String {
    format!("{lease}:host/1/0")
}

fn result_of(value: Value) -> Said {
    match value {
        Value::Int(number) => Said::Number(number),
        Value::BulkString(bytes) => Said::Text(String::from_utf8(bytes).unwrap()),
        Value::ServerError(error) => {
            let details = error.details().unwrap_or("");
            Said::Error(own_words(&format!("{} {details}", error.code())))
        }
        other => panic!("{other:?}"),
    }
}

/// The results for each lock key.
fn call(connection: &mut Connection, script: &str, keys: &[&str], args: &[&str]) -> Vec<Said> {
    let mut eval = redis::cmd("EVAL");
    eval.arg(script).arg(keys.len()).arg(keys).arg(args);
    connection
        .send_packed_command(&eval.get_packed_command())
        .unwrap();
    match connection.recv_response().unwrap() {
        Value::Array(values) => values.into_iter().map(result_of).collect(),
        one => vec![result_of(one)],
    }
}

/// Acquires the key for a fenced lock.
fn acquire(connection: &mut Connection, key: &str, lease: &str) -> Said {
    let (counter, field) = (format!("{key}~token"), field(lease));
    let args = ["fenced", &field, TTL];
    call(connection, &ACQUIRE, &[key, &counter], &args).remove(0)
}

fn renew(connection: &mut Connection, key: &str, lease: &str, ttl: &str) -> Said {
    call(connection, &RENEW, &[key], &[&field(lease), ttl]).remove(0)
}

fn release(connection: &mut Connection, key: &str, lease: &str) -> Said {
    let queue = format!("{key}~queue");
    call(connection, &RELEASE, &[key, &queue], &[&field(lease)]).remove(0)
}

/// Another client takes the key from the lease by force.
fn force(connection: &mut Connection, key: &str, lease: &str) -> Said {
    let queue = format!("{key}~queue");
    call(
        connection,
        &RELEASE,
        &[key, &queue],
        &[&format!("{lease}!")],
    )
    .remove(0)
}

fn inspect(connection: &mut Connection, key: &str) -> Said {
    call(connection, &INSPECT, &[key], &[]).remove(0)
}

fn token(number: u64) -> Said {
    Said::Text(format!("={number}"))
}

#[test]
fn a_lease_is_granted_renewed_and_released() {
    let server = server();
    let mut redis = connect(&server);
    assert_eq!(acquire(&mut redis, "k", ONE), token(1));
    let fields = ask(&server, &["HGETALL", "k"]).to_string();
    assert!(fields.contains(&field(ONE)), "{fields}");
    assert!(matches!(
        acquire(&mut redis, "k", TWO),
        Said::Number(1..=60_000)
    ));
    // A repeated request under the same lease does not count twice.
    assert_eq!(acquire(&mut redis, "k", ONE), token(2));
    assert_eq!(
        ask(&server, &["HGET", "k", &field(ONE)]).as_text(),
        Some("1")
    );
    say(&server, "PEXPIRE k 1000");
    assert_eq!(renew(&mut redis, "k", ONE, TTL), Said::Number(1));
    assert!(ttl_of(&server, "k") > 50_000);
    assert_eq!(renew(&mut redis, "k", ONE, "100"), Said::Number(1));
    assert!(ttl_of(&server, "k") > 50_000, "never shortened");
    for other in [
        renew(&mut redis, "k", TWO, TTL),
        release(&mut redis, "k", TWO),
    ] {
        assert_eq!(other, Said::Text(field(ONE)));
    }
    let Said::Text(found) = inspect(&mut redis, "k") else {
        panic!("not found");
    };
    assert!(found.ends_with(&format!(" {}", field(ONE))), "{found}");
    assert_eq!(force(&mut redis, "k", TWO), Said::Text(field(ONE)));
    assert_eq!(release(&mut redis, "k", ONE), Said::Number(1));
    assert_eq!(release(&mut redis, "k", ONE), Said::Number(0));
    assert_eq!(force(&mut redis, "k", ONE), Said::Number(0));
    acquire(&mut redis, "k", TWO);
    assert_eq!(force(&mut redis, "k", TWO), Said::Number(1));
    assert_eq!(renew(&mut redis, "k", ONE, TTL), Said::Number(0));
    assert_eq!(inspect(&mut redis, "k"), Said::Number(0));
}

/// The question whether the lease holds the key must not end a key without a ttl. A renewal sets a ttl again.
#[test]
fn a_renewal_restores_a_removed_ttl() {
    let server = server();
    let mut redis = connect(&server);
    acquire(&mut redis, "k", ONE);
    say(&server, "PERSIST k");
    assert_eq!(acquire(&mut redis, "k", TWO), Said::Number(-1));
    assert_eq!(renew(&mut redis, "k", ONE, "1"), Said::Number(1));
    assert_eq!(ttl_of(&server, "k"), -1);
    assert_eq!(renew(&mut redis, "k", ONE, TTL), Said::Number(1));
    assert!(ttl_of(&server, "k") > 50_000);
}

/// Makes one key of each type, with and without a ttl, and returns their names and types.
fn foreign_keys(server: &Server) -> [(&'static str, &'static str); 8] {
    for command in [
        "SET string text PX 60000",
        "SET string-for-ever text",
        "RPUSH list a",
        "SADD set a",
        "ZADD zset 1 a",
        "XADD stream * a b",
        "HSET hash a 1 b 2",
    ] {
        say(server, command);
    }
    ask(server, &["HSET", "java", OF_JAVA, "2"]);
    [
        ("string", "string"),
        ("string-for-ever", "string"),
        ("list", "list"),
        ("set", "set"),
        ("zset", "zset"),
        ("stream", "stream"),
        ("hash", "hash"),
        ("java", "hash"),
    ]
}

/// No script changes a key of another program, whatever its type and its ttl.
#[test]
fn each_foreign_key_is_taken_and_stays() {
    let server = server();
    let mut redis = connect(&server);
    for (key, kind) in foreign_keys(&server) {
        let before = ask(&server, &["DUMP", key]);
        let said = [
            acquire(&mut redis, key, ONE),
            inspect(&mut redis, key),
            renew(&mut redis, key, ONE, TTL),
            release(&mut redis, key, ONE),
            force(&mut redis, key, ONE),
        ];
        for said in said {
            let text = said.text();
            assert!(
                text.starts_with(&format!("FOREIGN {kind} ")),
                "{key}: {said:?}"
            );
            assert!(
                !text.contains("text") && !text.contains(OF_JAVA),
                "{key}: {text}"
            );
        }
        assert_eq!(ask(&server, &["DUMP", key]), before, "{key}");
        let has_ttl = ttl_of(&server, key) != -1;
        assert_eq!(has_ttl, key == "string", "{key}");
        assert_eq!(
            ask(&server, &["EXISTS", &format!("{key}~token")]),
            Reply::Int(0)
        );
    }
}

/// Two holders of Redisson have different marks.
#[test]
fn the_mark_names_the_holder_without_its_field() {
    let server = server();
    let mut redis = connect(&server);
    let mark = |redis: &mut Connection| {
        let text = acquire(redis, "k", ONE).text();
        text.rsplit(' ').next().unwrap().to_owned()
    };
    ask(&server, &["HSET", "k", OF_JAVA, "1"]);
    let first = mark(&mut redis);
    assert_eq!((first.len(), mark(&mut redis)), (8, first.clone()));
    ask(&server, &["DEL", "k"]);
    ask(
        &server,
        &["HSET", "k", "8743c9c0-0795-4907-87fd-6c719a6b4586:32", "1"],
    );
    assert_ne!(mark(&mut redis), first);
    // A hash with a long field is no lock, and has no mark.
    ask(&server, &["DEL", "k"]);
    ask(&server, &["HSET", "k", &"f".repeat(256), "1"]);
    assert_eq!(mark(&mut redis), "0");
}

/// Redisson would take a hash without a ttl for a lock of its own caller.
#[test]
fn a_refused_command_leaves_no_hash_behind() {
    let server = server();
    let mut redis = connect(&server);
    for refused in ["pexpire", "incr", "get", "hset"] {
        say(&server, &format!("ACL SETUSER default -{refused}"));
        let said = acquire(&mut redis, "k", ONE);
        say(&server, &format!("ACL SETUSER default +{refused}"));
        assert!(matches!(said, Said::Error(_)), "{refused}: {said:?}");
        assert_eq!(ask(&server, &["EXISTS", "k"]), Reply::Int(0), "{refused}");
    }
    for (counter, kind) in [
        ("SET k~token -7", "string"),
        ("SET k~token text", "string"),
        ("SET k~token 9223372036854775807", "string"),
        ("HSET k~token a 1", "hash"),
    ] {
        ask(&server, &["DEL", "k~token"]);
        say(&server, counter);
        let said = acquire(&mut redis, "k", ONE);
        let wanted = format!("ERR the counter k~token has no next number: it is a {kind}");
        assert_eq!(said, Said::Error(wanted), "{counter}");
        assert_eq!(ask(&server, &["EXISTS", "k"]), Reply::Int(0), "{counter}");
    }
}

/// A token may have more digits than a Lua number can hold.
#[test]
fn the_token_is_the_exact_number_of_the_counter() {
    let server = server();
    let mut redis = connect(&server);
    for before in [41, (1 << 53) + 1, (1 << 62) + 12_345] {
        ask(&server, &["SET", "k~token", &before.to_string()]);
        assert_eq!(acquire(&mut redis, "k", ONE), token(before + 1));
        release(&mut redis, "k", ONE);
    }
}

/// Without Redisson's counter, tokens are those of the fence counter.
#[test]
fn locks_that_are_not_fenced_use_the_fence_counter() {
    let server = server();
    let mut redis = connect(&server);
    let mut last = 0;
    for _ in 0..3 {
        let args = ["", &field(ONE), TTL];
        let said = call(&mut redis, &ACQUIRE, &["k", "~fence"], &args).remove(0);
        let micros: u64 = said.text().parse().unwrap();
        assert!(micros > last && said.text().len() == 16, "{said:?}");
        last = micros;
        release(&mut redis, "k", ONE);
    }
    assert_eq!(ask(&server, &["TYPE", "~fence"]).to_string(), "zset");
}

/// A key with an error or a holder does not change the results of the other keys.
#[test]
fn each_key_of_a_call_has_its_own_result() {
    let server = server();
    let mut redis = connect(&server);
    say(&server, "SET b text");
    ask(&server, &["HSET", "c", &field(TWO), "1"]);
    say(&server, "PEXPIRE c 60000");
    let (one, keys) = (field(ONE), ["a", "b", "c", "d"]);
    let counters = ["a~t", "b~t", "c~t", "d~t"];
    let args = [&["fenced"][..], &[&*one, TTL].repeat(4)].concat();
    let said = call(&mut redis, &ACQUIRE, &[keys, counters].concat(), &args);
    assert_eq!((&said[0], &said[3]), (&token(1), &token(1)));
    assert!(said[1].text().starts_with("FOREIGN string -1 "), "{said:?}");
    assert!(matches!(said[2], Said::Number(1..=60_000)), "{said:?}");
    let args = [&*one, TTL].repeat(4);
    let said = call(&mut redis, &RENEW, &keys, &args);
    assert_eq!((&said[0], &said[3]), (&Said::Number(1), &Said::Number(1)));
    assert_eq!(said[2], Said::Text(field(TWO)));
    let said = call(
        &mut redis,
        &RELEASE,
        &[keys, counters].concat(),
        &[&*one; 4],
    );
    assert_eq!((&said[0], &said[3]), (&Said::Number(1), &Said::Number(1)));
    assert_eq!(call(&mut redis, &INSPECT, &keys, &[])[0], Said::Number(0));
}

/// A replica may be behind its primary, so it must not report that a lock is taken, held or lost.
#[test]
fn a_replica_answers_no_question_about_a_lock() {
    let server = server();
    let mut redis = connect(&server);
    acquire(&mut redis, "k", ONE);
    acquire(&mut redis, "for-ever", ONE);
    say(&server, "PERSIST for-ever");
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    for said in [
        acquire(&mut redis, "k", TWO),
        acquire(&mut redis, "free", TWO),
        renew(&mut redis, "k", ONE, TTL),
        renew(&mut redis, "k", TWO, TTL),
        renew(&mut redis, "free", TWO, TTL),
        renew(&mut redis, "for-ever", ONE, "1"),
        release(&mut redis, "k", ONE),
        release(&mut redis, "k", TWO),
        release(&mut redis, "free", TWO),
    ] {
        assert!(said.text().starts_with("READONLY"), "{said:?}");
    }
}
