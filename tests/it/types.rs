//! Properties of the public types: unwind safety, use in messages, and the types that names may have.

use std::borrow::Cow;
use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};

use leasehold::{
    Client, Error, ErrorKind, FencedValue, LostSignal, MemoryStore, Mutex, MutexGuard,
    ReentrantGuard, ReentrantMutex, Released,
};

use crate::steady::steady;
use crate::support::{SOON, server};

const fn is_unwind_safe<T: UnwindSafe + RefUnwindSafe>() {}
const _: () = {
    is_unwind_safe::<Client>();
    is_unwind_safe::<Mutex>();
    is_unwind_safe::<MutexGuard>();
    is_unwind_safe::<ReentrantMutex>();
    is_unwind_safe::<ReentrantGuard>();
    is_unwind_safe::<FencedValue>();
    is_unwind_safe::<LostSignal>();
    is_unwind_safe::<MemoryStore>();
    is_unwind_safe::<Released>();
    is_unwind_safe::<Error>();
};

const fn is_shared<T: Send + Sync>() {}
const _: () = {
    is_shared::<Client>();
    is_shared::<Mutex>();
    is_shared::<MutexGuard>();
    is_shared::<Released>();
};

#[test]
fn a_client_is_usable_after_a_caught_panic() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    // A server catches the panic of a handler like this.
    let panicked = catch_unwind(|| client.with_lock("k", || panic!("as it should")));
    assert!(panicked.is_err());
    let again = client.try_with_lock_for("k", SOON, || 1).unwrap();
    assert_eq!(again, Some(1));
}

#[test]
fn names_of_each_text_type_are_accepted() {
    let client = Client::memory().unwrap();
    let [owned, boxed] = [String::from("k"), String::from("k")];
    let mutexes = [
        client.mutex("k"),
        client.mutex(&owned),
        client.mutex(owned),
        client.mutex(Cow::Borrowed("k")),
        client.mutex(boxed.into_boxed_str()),
    ];
    assert!(mutexes.iter().all(|mutex| mutex.key() == "k"));
    assert_eq!(client.reentrant_mutex(String::from("r")).key(), "r");
    let value = client.fenced_value(format!("v{}", 1));
    value.write(1, "x").unwrap();
    assert_eq!(client.with_lock(format!("k{}", 1), || 1).unwrap(), 1);
}

#[test]
fn guards_display_their_key_on_one_line() {
    let client = Client::memory().unwrap();
    let guard = client.mutex("invoice:42").lock().unwrap();
    assert_eq!(guard.to_string(), "invoice:42");
    let key = "a\u{202e}b";
    let guard = client.reentrant_mutex(key).lock().unwrap();
    assert_eq!(
        (guard.key(), guard.to_string().as_str()),
        (key, r"a\u{202e}b")
    );
}

#[test]
fn an_invalid_key_is_in_its_error() {
    let client = Client::memory().unwrap();
    let long = "x".repeat(2000);
    let cut = format!("{}..", "x".repeat(32));
    for (given, shown) in [
        ("", ""),
        ("~a", "~a"),
        ("a\nb", r"a\nb"),
        (long.as_str(), cut.as_str()),
    ] {
        let mutex = client.mutex(given);
        let errors = [
            mutex.lock().unwrap_err(),
            mutex.inspect().unwrap_err(),
            client.fenced_value(given).read().unwrap_err(),
            client.reentrant_mutex(given).try_lock().unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidKey);
            assert_eq!(error.key(), Some(shown));
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("invalid key (\"{shown}\"): it ")),
                "{text}"
            );
        }
    }
}

#[test]
fn debug_of_a_client_shows_no_password() {
    let url = "redis://user:hunter2@127.0.0.1:1/3";
    let client = Client::builder(url).build_lazy().unwrap();
    let text = format!("{client:?}");
    assert!(text.contains("127.0.0.1:1"), "{text}");
    assert!(
        !text.contains("hunter2") && !text.contains("user"),
        "{text}"
    );
    let text = format!("{:?}", Client::memory().unwrap());
    assert!(text.contains("memory://"), "{text}");
}
