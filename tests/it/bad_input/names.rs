//! Names of locks that are refused, and unusual names that are accepted.

use leasehold::{Error, ErrorKind};

use crate::steady::steady;
use crate::support::{ask, is_held, millis, server};

use super::hasty;
use crate::fakes::closed_port;

/// The errors of all calls that acquire a lock with this invalid name. There is no server: the name is checked before
/// the client connects.
fn refusals(name: &str) -> [Error; 5] {
    let url = format!("redis://127.0.0.1:{}", closed_port());
    let client = hasty(&url).build_lazy().unwrap();
    let mutex = client.mutex(name);
    [
        mutex.lock().unwrap_err(),
        mutex.try_lock().unwrap_err(),
        mutex.try_lock_for(millis(10)).unwrap_err(),
        mutex.with(|_| ()).unwrap_err(),
        client.with_lock(name, || ()).unwrap_err(),
    ]
}

#[test]
fn invalid_keys_are_refused_without_a_request() {
    let megabyte = "x".repeat(1 << 20);
    let long = "é".repeat(513);
    let names = [
        "",
        "a\0b",
        "\0",
        "a\nb",
        "line\r\n",
        "tab\tb",
        "\u{7f}",
        "\u{85}",
        "~",
        "~fence",
        "~a",
        "a~fence",
        "a:~fence",
        "é~fence",
        "a~~fence",
        "a~b~fence",
        "a:~queue:b",
        "a:~value:b",
        "a:~to:b",
    ];
    for name in names.into_iter().chain([megabyte.as_str(), &long]) {
        for error in refusals(name) {
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
            let text = format!("{error} {error:?}");
            assert!(text.len() < 1000, "{} bytes of error", text.len());
            assert!(!text.contains(['\0', '\n', '\r']), "{text:?}");
        }
    }
}

#[test]
fn the_longest_key_is_counted_in_bytes() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let (fits, too_long) = ("é".repeat(512), format!("{}x", "é".repeat(512)));
    client.with_lock(&fits, || ()).unwrap();
    let error = client.mutex(&too_long).lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    assert!(error.to_string().contains("1025"), "{error}");

    let largest = steady(&server.url()).max_key_bytes(65_536).build().unwrap();
    largest.with_lock("x".repeat(65_536), || ()).unwrap();
    let error = largest.mutex("x".repeat(65_537)).lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
}

#[test]
fn odd_but_printable_keys_are_accepted() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for name in [
        " ",
        "a b",
        "a~",
        "ключ",
        "🔒",
        "{tag}:x",
        "*",
        "\"'`\\",
        "%s%d",
        "a:b:c",
        "a:~Fence",
        "a:～fence",
        "a:~\u{301}fence",
        "a:~\u{200b}fence",
        "a:~fenc",
        "a:~queue",
        "a:~values:b",
    ] {
        let guard = client.mutex(name).lock().unwrap();
        assert_eq!(guard.key(), name);
        assert!(is_held(&server, name), "{name:?}");
        assert!(client.mutex(name).try_lock().unwrap().is_none(), "{name:?}");
        guard.unlock().unwrap();
        assert!(!is_held(&server, name), "{name:?}");
    }
}

/// The attack: a user who chooses names under the prefix `app:` tries to reach keys of the prefix `app:billing:`.
#[test]
fn names_reach_no_key_of_a_longer_prefix() {
    let server = server();
    let build = |prefix| steady(&server.url()).prefix(prefix).build().unwrap();
    let (outer, inner) = (build("app:"), build("app:billing:"));
    let own = ["billing:~fence", "billing:~queue:k", "billing:~value:k"];
    for name in own {
        let refusals = [
            outer.mutex(name).try_lock().unwrap_err(),
            outer.reentrant_mutex(name).try_lock().unwrap_err(),
            outer.fenced_value(name).write(1, "a").unwrap_err(),
            outer.mutex(name).force_unlock().unwrap_err(),
        ];
        for error in refusals {
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{name}: {error}");
        }
    }
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), Some(0));
    let guard = inner.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    inner.fenced_value("k").write(token, "a").unwrap();
    guard.unlock().unwrap();
}

/// Nested prefixes are a mistake that no client can detect, but the harm is bounded: a key in Redis still has one
/// holder, and a fenced value refuses smaller tokens of the other prefix.
#[test]
fn nested_prefixes_exclude_and_stale_tokens_are_refused() {
    let server = server();
    let build = |prefix| steady(&server.url()).prefix(prefix).build().unwrap();
    let (outer, inner) = (build("a:"), build("a:b:"));
    // The counter is ahead of the clock of Redis, as it is after the clock was set back.
    ask(&server, &["ZADD", "a:b:~fence", "4102444800000000", "t"]);
    let guard = inner.mutex("x").lock().unwrap();
    assert!(outer.mutex("b:x").try_lock().unwrap().is_none());
    let total = outer.fenced_value("total");
    total.write(guard.fencing_token(), "17").unwrap();
    guard.unlock().unwrap();

    let guard = outer.mutex("b:x").lock().unwrap();
    let error = total.write(guard.fencing_token(), "0").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken);
    assert_eq!(total.read().unwrap().as_deref(), Some(&b"17"[..]));
}
