//! URLs that cannot be used. No text of the library shows the password of a URL.

use std::thread;

use leasehold::{Client, ErrorKind};
use proptest::prelude::*;

use super::{all_texts, hasty};

const SECRET: &str = "hunter2";

#[test]
fn an_unusable_url_is_refused_without_connecting() {
    for url in [
        "",
        "localhost",
        "127.0.0.1:6379",
        "http://127.0.0.1:6379",
        "rediss://127.0.0.1:6379/#insecure",
        "redis://",
        "redis://127.0.0.1:99999",
        "redis://127.0.0.1:port",
        "redis://127.0.0.1/notanumber",
        "redis://127.0.0.1/0?timeout=5",
        "redis://127.0.0.1/0?protocol=9",
        "unix://",
        "unix:///x?shard=1",
        "unix:///x?db=zero",
    ] {
        for error in [
            Client::open(url).expect_err(url),
            hasty(url).build_lazy().expect_err(url),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{url}: {error}");
            assert!(error.to_string().contains("url"), "{url}: {error}");
        }
    }
}

#[test]
fn an_unknown_option_lists_the_known_ones() {
    let error = Client::open("redis://127.0.0.1/0?timeout=5").unwrap_err();
    assert!(error.to_string().contains("protocol"), "{error}");
    let error = Client::open("unix:///run/x?shard=1&db=0").unwrap_err();
    assert!(
        error.to_string().contains("db, user, pass, protocol"),
        "{error}"
    );
}

#[test]
fn a_long_url_makes_a_short_error() {
    let url = format!("redis://127.0.0.1/{}", "9".repeat(1 << 20));
    let error = Client::open(&url).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(all_texts(&error).len() < 4000);
}

#[test]
fn no_error_shows_the_password_of_a_url() {
    for url in [
        format!("http://user:{SECRET}@host"),
        format!("redis://user:{SECRET}@host:port"),
        format!("redis://:{SECRET}@host:99999"),
        format!("redis://:{SECRET}/x@host"),
        format!("redis://:{SECRET}@host@host:port"),
        format!("redis://user:{SECRET}@host/notanumber"),
        format!("redis://user:{SECRET}@host/0?timeout=5"),
        format!("redis://user:{SECRET}@host?protocol=9"),
        format!("rediss://user:{SECRET}@host"),
        format!("user:{SECRET}@host:6379"),
        // The options of a socket's URL in a URL of a host.
        format!("redis://host/0?pass={SECRET}"),
        format!("redis://host/0?password={SECRET}"),
        format!("redis://host/0?PASS={SECRET}"),
        format!("redis://host/0?user=me&pass={SECRET}&db=1"),
        format!("unix:///x?user=me&password={SECRET}"),
        format!("unix:///x?pass={SECRET}&shard=1"),
        format!("unix:///x?pass=&pass={SECRET}&shard=1"),
        format!("unix:///x?pass={SECRET}&db=zero"),
        format!("unix:///x?p%61ss={SECRET}&db=zero"),
        format!("unix:///nowhere/at/all?user=me&pass={SECRET}"),
        format!("redis://user:{SECRET}@127.0.0.1:1"),
        // A password in the place of the user's name.
        format!("redis://{SECRET}@127.0.0.1:1"),
        format!("redis://{SECRET}@127.0.0.1:port"),
        format!("redis://:{SECRET}%40127.0.0.1:1"),
        format!("redis://{SECRET}%40127.0.0.1:1"),
        format!("redis://user:{SECRET}"),
        format!("redis://{SECRET}#4@127.0.0.1:1"),
        format!("redis://:{SECRET}%ff@127.0.0.1:1"),
        format!("redis://:{SECRET}@127.0.0.1:1,127.0.0.1:2"),
        format!("redis://:{SECRET},127.0.0.1:0"),
        format!("redis://:{SECRET}@b\u{fc}cher:1"),
        format!("unix:///x?pass%3D{SECRET}"),
        format!("unix:///x%3Fpass%3D{SECRET}"),
    ] {
        let error = hasty(&url).build().unwrap_err();
        let text = all_texts(&error);
        assert!(!text.contains(SECRET), "{url} gives {text}");
    }
}

#[test]
fn debug_texts_do_not_show_the_password() {
    let builder = hasty(&format!("redis://user:{SECRET}@127.0.0.1:1/0"));
    let text = format!("{builder:?} {builder:#?}");
    assert!(!text.contains(SECRET), "{text}");
    let client = builder.build_lazy().unwrap();
    let text = format!("{client:?} {client:#?} {:?}", client.mutex("k"));
    assert!(!text.contains(SECRET), "{text}");
}

/// URLs, well-formed and malformed. `PW` stands for the password.
const SHAPES: [&str; 42] = [
    "redis://PW@127.0.0.1:1",
    "redis://:PW@127.0.0.1:1",
    "redis://PW:@127.0.0.1:1",
    "redis://u:PW@127.0.0.1:1/0",
    "valkey://u:PW@127.0.0.1:1",
    "redis://u:PW",
    "redis://:PW",
    "redis://:PW%40127.0.0.1:1",
    "redis://u%3APW%40127.0.0.1:1",
    "redis://PW%40127.0.0.1:1",
    "redis://u:PW@127.0.0.1:port",
    "redis://u:PW@127.0.0.1:1/x",
    "redis://u:PW@127.0.0.1:1/0?timeout=5",
    "redis://u:PW@127.0.0.1:1?protocol=9",
    "redis://u:PW@0.0.0.0:1",
    "redis://u:1?protocol=PW@127.0.0.1:1",
    "rediss://:PW@127.0.0.1:1",
    "http://u:PW@127.0.0.1",
    "u:PW@127.0.0.1:1",
    "redis:PW@127.0.0.1:1",
    "redis:/:PW@127.0.0.1:1",
    "redis:///:PW@127.0.0.1:1",
    "redis//:PW@127.0.0.1:1",
    "redis://127.0.0.1:1?pass=PW",
    "redis://127.0.0.1:1/0?password=PW",
    "redis://127.0.0.1:1/0#PW",
    "unix:///x?pass=PW",
    "unix:///x?pass%3DPW",
    "unix:///x%3Fpass=PW",
    "unix:///x&pass=PW",
    "unix:///x?PW",
    "unix:///x?db=0&pass=PW&shard=1",
    "unix://u:PW@/x",
    "redis+cluster://u:PW@127.0.0.1:1,127.0.0.1:2",
    "rediss+cluster://u:PW@127.0.0.1:1",
    "redis+cluster://127.0.0.1:1,u:PW@127.0.0.1:2",
    "redis+cluster://u:PW@127.0.0.1:1/3",
    "redis+sentinel://u:PW@127.0.0.1:1/g",
    "rediss+sentinel://u:PW@127.0.0.1:1/g",
    "redis+sentinel://127.0.0.1:1,u:PW@127.0.0.1:2/g",
    "redis+sentinel://u:PW@127.0.0.1:1",
    "PW",
];

/// Text before or behind the secret part of a password.
fn noise() -> impl Strategy<Value = String> {
    "[a-z0-9:/?#%&=;+ !.\\\\\\[\\]\"-]{0,4}"
}

fn percent_encoded(text: &str) -> String {
    let bytes = text.bytes().map(|byte| match byte {
        b'a'..=b'z' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    });
    bytes.collect()
}

/// Fails if the builder, the client or the error of a URL shows the secret.
fn assert_hides(url: &str, secret: &str) {
    let builder = hasty(url);
    let mut text = format!("{builder:?}");
    text += &match builder.build() {
        Ok(client) => format!("{client:?}"),
        Err(error) => all_texts(&error),
    };
    assert!(!text.contains(secret), "{url} gives {text}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 48,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_url_shows_a_random_password(
        before in noise(),
        secret in "[g-z]{9}",
        behind in noise(),
        at in any::<bool>(),
    ) {
        let written = format!("{before}{secret}{behind}");
        // Most attempts wait for other threads, so they run at the same time.
        thread::scope(|scope| {
            for shape in SHAPES {
                // The text behind the last `@` is the host, which errors show. So a password may end with `@` only if a
                // host follows.
                let at = if at && shape.contains("@127") { "@" } else { "" };
                let raw = format!("{written}{at}");
                for password in [percent_encoded(&raw), raw] {
                    let (url, secret) = (shape.replace("PW", &password), &secret);
                    scope.spawn(move || assert_hides(&url, secret));
                }
            }
        });
    }
}
