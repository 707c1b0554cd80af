//! Keys that cannot be names of locks, and those at the edge that can.

use leasehold::{Error, ErrorKind};

use crate::steady::steady;
use crate::support::{is_held, millis, server};

use super::hasty;
use crate::fakes::closed_port;

/// What every way to ask for a lock says to a bad key. There is no server: a key is judged first.
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
fn keys_that_cannot_be_names_are_refused_without_asking_redis() {
    let megabyte = "x".repeat(1 << 20);
    let long = "é".repeat(513);
    let names = [
        "", "a\0b", "\0", "a\nb", "line\r\n", "tab\tb", "\u{7f}", "\u{85}", "~", "~fence", "~a",
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
fn the_longest_key_is_counted_in_bytes_and_can_be_set() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let (fits, too_long) = ("é".repeat(512), format!("{}x", "é".repeat(512)));
    client.with_lock(&fits, || ()).unwrap();
    let error = client.mutex(&too_long).lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    assert!(error.to_string().contains("1025"), "{error}");

    let largest = steady(&server.url()).max_key_bytes(65_536).build().unwrap();
    largest.with_lock(&"x".repeat(65_536), || ()).unwrap();
    let error = largest.mutex(&"x".repeat(65_537)).lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
}

#[test]
fn odd_but_printable_keys_are_locks_like_any_other() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for name in [
        " ", "a b", "a~", "ключ", "🔒", "{tag}:x", "*", "\"'`\\", "%s%d", "a:b:c",
    ] {
        let guard = client.mutex(name).lock().unwrap();
        assert_eq!(guard.key(), name);
        assert!(is_held(&server, name), "{name:?}");
        assert!(client.mutex(name).try_lock().unwrap().is_none(), "{name:?}");
        guard.unlock().unwrap();
        assert!(!is_held(&server, name), "{name:?}");
    }
}
