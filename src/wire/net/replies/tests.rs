//! Tests with replies in pieces, hostile replies, and all kinds of replies that the parser of redis-rs reads.

use proptest::prelude::*;

use super::*;

const LIMIT: usize = 4096;

/// Reads `bytes` in pieces of these lengths, used in turn, until all are read or there is an error. Checks that the
/// buffer is bounded by the bytes that have come.
fn read_all(bytes: &[u8], pieces: &[usize], limit: usize) -> (Vec<Value>, bool) {
    let mut replies = Replies::new();
    let (mut values, mut fed) = (Vec::new(), 0);
    let mut pieces = pieces.iter().cycle();
    loop {
        match replies.next(Limit::Fixed(limit)) {
            Ok(Some(value)) => values.push(value),
            Ok(None) if fed == bytes.len() => return (values, true),
            Ok(None) => {
                let piece = (*pieces.next().unwrap()).clamp(1, bytes.len() - fed);
                let mut source = &bytes[fed..fed + piece];
                replies.fill(Limit::Fixed(limit), &mut source).unwrap();
                fed += piece - source.len();
                // An error may be a little longer than the string that it replaces.
                let most = BUFFER.max(2 * fed).min(BUFFER.max(limit)) + 100;
                assert!(replies.buffer.capacity() <= most, "{fed} bytes came in");
            }
            Err(_) => return (values, false),
        }
    }
}

/// Reads the first reply in `bytes`.
fn first(bytes: &[u8], limit: usize) -> RedisResult<Option<Value>> {
    let mut replies = Replies::new();
    replies.buffer = bytes.to_vec();
    replies.end = bytes.len();
    replies.next(Limit::Fixed(limit))
}

fn line() -> impl Strategy<Value = String> {
    "[ -~é\r]{0,12}"
}

/// A well-formed reply of any kind, as it is sent.
fn reply() -> impl Strategy<Value = Vec<u8>> {
    let lines = ("[-+_(]", line()).prop_map(|(sign, line)| format!("{sign}{line}\r\n"));
    let errors = prop::sample::select(vec!["-ERR a b\r\n", "-NOSCRIPT No\r\n", "-READONLY\r\n"]);
    let numbers = any::<i64>().prop_map(|n| format!(":{n}\r\n"));
    let doubles = any::<f64>().prop_map(|n| format!(",{n:?}\r\n"));
    let others = prop::sample::select(vec![
        "#t\r\n",
        "#f\r\n",
        "$-1\r\n",
        "*-1\r\n",
        "~-1\r\n",
        "+OK\r\n",
        ",inf\r\n",
        ": 7 \r\n",
        "=6\r\ntxt:ab\r\n",
        ">0\r\n",
        "*2\r\n>0\r\n$7\r\nmessage\r\n",
        "*0\r\n",
    ]);
    let lines = prop_oneof![lines, numbers, doubles];
    let lines = prop_oneof![
        lines,
        errors.prop_map(str::to_owned),
        others.prop_map(str::to_owned)
    ];
    let strings = ("[$!]", prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(sign, bytes)| {
        [
            format!("{sign}{}\r\n", bytes.len()).as_bytes(),
            &bytes,
            b"\r\n",
        ]
        .concat()
    });
    let leaf = prop_oneof![lines.prop_map(String::into_bytes), strings];
    leaf.prop_recursive(4, 40, 6, |inner| {
        let elements = prop::collection::vec(inner, 1..6);
        let kinds = prop::sample::select(vec![
            "$7\r\nmessage\r\n",
            "$10\r\ninvalidate\r\n",
            "+invalidate\r\n",
            "$9\r\nsubscribe\r\n",
        ]);
        ("[*~>%|]", elements, kinds).prop_map(|(sign, mut elements, kind)| {
            let (pairs, odd) = (elements.len() / 2, elements.len() % 2);
            let count = match sign.as_str() {
                "%" => {
                    elements.truncate(2 * pairs);
                    pairs
                }
                "|" => {
                    elements.truncate(2 * pairs + odd - usize::from(odd == 0));
                    elements.len() / 2
                }
                ">" => {
                    elements.insert(0, kind.as_bytes().to_vec());
                    elements.len()
                }
                _ => elements.len(),
            };
            let header = format!("{sign}{count}\r\n").into_bytes();
            [header, elements.concat()].concat()
        })
    })
}

/// The first value that the parser of redis-rs reads. Must not be called for arrays that are announced to be huge.
fn by_redis(bytes: &[u8]) -> Option<Value> {
    redis::parse_redis_value(bytes).ok()
}

/// The value as text, so that NaN is equal to itself.
fn said(value: Option<&Value>) -> String {
    format!("{value:?}")
}

proptest! {
    #[test]
    fn fuzz_replies_are_read_as_redis_rs_reads_them(
        replies in prop::collection::vec(reply(), 1..5),
        pieces in prop::collection::vec(1_usize..30, 1..8),
    ) {
        let (values, is_whole) = read_all(&replies.concat(), &pieces, usize::MAX);
        prop_assert!(is_whole);
        prop_assert_eq!(values.len(), replies.len());
        for (value, bytes) in values.iter().zip(&replies) {
            let expected = by_redis(bytes);
            prop_assert!(expected.is_some(), "{}", bytes.escape_ascii());
            prop_assert_eq!(said(Some(value)), said(expected.as_ref()));
        }
    }

    #[test]
    fn fuzz_spoilt_replies_are_read_as_by_redis_rs(
        mut bytes in reply(),
        at in any::<prop::sample::Index>(),
        byte in prop::sample::select(b"+-:$*_>%~|,#!=(\r\n0123456789ta ".to_vec()),
    ) {
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let value = first(&bytes, 1 << 20).ok().flatten();
        prop_assert_eq!(said(value.as_ref()), said(by_redis(&bytes).as_ref()));
    }

    #[test]
    fn fuzz_any_bytes_in_any_pieces_are_bounded(
        parts in prop::collection::vec(prop_oneof![
            4 => "[-+:$*_>%~|,#!=(]-?[0-9]{0,20}\r\n".prop_map(String::into_bytes),
            2 => prop::collection::vec(any::<u8>(), 0..300),
            1 => Just(b"\r\n".to_vec()),
            1 => "[*%~>|][0-9]{1,3}\r\n".prop_map(String::into_bytes),
        ], 0..200),
        pieces in prop::collection::vec(1_usize..20_000, 1..8),
    ) {
        read_all(&parts.concat(), &pieces, LIMIT);
    }
}

#[test]
fn replies_are_nested_as_deep_as_in_redis_rs() {
    for sign in ["*1", "~1", "%1\r\n+a"] {
        let nested = |depth: usize| format!("{}:1\r\n", format!("{sign}\r\n").repeat(depth));
        for depth in [MAX_DEPTH - 1, MAX_DEPTH] {
            let bytes = nested(depth).into_bytes();
            let value = first(&bytes, usize::MAX).ok().flatten();
            assert_eq!(value.is_some(), depth < MAX_DEPTH, "{sign} {depth}");
            assert_eq!(said(value.as_ref()), said(by_redis(&bytes).as_ref()));
        }
    }
}

#[test]
fn a_reply_is_refused_by_what_it_announces() {
    let whole = format!("${}\r\n{}\r\n", LIMIT - 9, "x".repeat(LIMIT - 9));
    assert_eq!(whole.len(), LIMIT);
    assert!(first(whole.as_bytes(), LIMIT).unwrap().is_some());
    let dropped = first(whole.as_bytes(), LIMIT - 1).unwrap();
    assert!(matches!(dropped, Some(Value::ServerError(_))));
    let elements = LIMIT / size_of::<Value>();
    for bytes in [
        format!("={LIMIT}\r\n"),
        format!("!{}\r\n", i64::MAX),
        format!("*{}\r\n", elements + 1),
        format!("*{}\r\n", i64::MAX),
        format!("~{}\r\n", elements + 1),
        format!(">{}\r\n", elements + 1),
        format!("%{}\r\n", elements / 2 + 1),
        format!("|{}\r\n", i64::MAX),
        format!("*2\r\n*{}\r\n", elements - 1),
        format!("+{}", "x".repeat(LIMIT - 1)),
    ] {
        let what = first(bytes.as_bytes(), LIMIT).unwrap_err().to_string();
        let expected = format!("more than {LIMIT} bytes");
        assert!(what.contains("too large"), "{bytes:.40}: {what}");
        assert!(what.contains(&expected), "{bytes:.40}: {what}");
    }
    let (mut replies, mut array) = (Replies::new(), &b"*1000\r\n"[..]);
    let limit = Limit::Set {
        bytes: 2 * LIMIT,
        max_reply_bytes: LIMIT,
    };
    replies.fill(limit, &mut array).unwrap();
    let error = replies.next(limit).unwrap_err();
    assert_eq!(error.code(), Some(TOO_LARGE));
    let expected = format!("more than {LIMIT} bytes (`max_reply_bytes`)");
    assert_eq!(error.detail(), Some(&*expected));
    let fits = format!("*{}\r\n", elements - 1);
    assert_eq!(first(fits.as_bytes(), LIMIT), Ok(None));
}

#[test]
fn many_long_strings_are_all_replaced() {
    // Errors that replace strings do not count towards the limit. Here they would exceed it.
    let count = LIMIT / (size_of::<Value>() + 30);
    let string = format!("$900\r\n{}\r\n", "x".repeat(900));
    let bytes = format!("*{count}\r\n{}", string.repeat(count));
    let (values, is_whole) = read_all(bytes.as_bytes(), &[8192], LIMIT);
    assert!(is_whole, "{values:?}");
    let Value::Array(strings) = &values[0] else {
        panic!("it is {values:?}");
    };
    assert_eq!(strings.len(), count);
    let is_replaced = |value: &Value| matches!(value, Value::ServerError(_));
    assert!(is_replaced(strings.last().unwrap()));
}

#[test]
fn no_string_is_longer_than_one_may_be() {
    let limit = Limit::Set {
        bytes: 2 * LIMIT,
        max_reply_bytes: LIMIT,
    };
    for (len, fits) in [(LIMIT, true), (LIMIT + 1, false)] {
        let bytes = format!("${len}\r\n{}\r\n", "x".repeat(len));
        let (mut replies, mut rest) = (Replies::new(), bytes.as_bytes());
        let value = loop {
            match replies.next(limit).unwrap() {
                Some(value) => break value,
                None => replies.fill(limit, &mut rest).unwrap(),
            }
        };
        assert_eq!(matches!(value, Value::BulkString(_)), fits, "{len}");
    }
}

proptest! {
    #[test]
    fn fuzz_a_long_string_is_dropped_others_are_read(
        lens in prop::collection::vec(prop_oneof![0_usize..100, LIMIT..3 * LIMIT], 1..8),
        pieces in prop::collection::vec(1_usize..9_000, 1..8),
    ) {
        let string = |len: &usize| format!("${len}\r\n{}\r\n", "x".repeat(*len));
        let strings: String = lens.iter().map(string).collect();
        let bytes = format!("*{}\r\n{strings}:7\r\n", lens.len());
        let (values, is_whole) = read_all(bytes.as_bytes(), &pieces, LIMIT);
        prop_assert!(is_whole);
        prop_assert_eq!(values.len(), 2);
        let Value::Array(elements) = &values[0] else {
            panic!("it is {values:?}");
        };
        for (element, len) in elements.iter().zip(&lens) {
            match element {
                Value::BulkString(string) => prop_assert_eq!(string.len(), *len),
                Value::ServerError(error) => {
                    prop_assert!(*len >= LIMIT);
                    prop_assert_eq!(error.code(), TOO_LARGE);
                    let expected = format!("a string of {len} bytes: longest reply {LIMIT} bytes");
                    prop_assert_eq!(error.details(), Some(&*expected));
                }
                other => panic!("an element is {other:?}"),
            }
        }
        prop_assert_eq!(&values[1], &Value::Int(7));
    }
}

#[test]
fn nonsense_is_refused_before_its_line_ends() {
    for bytes in [&b"HTTP"[..], b"220 mail", b"\0", b"*1\r\nx"] {
        assert!(first(bytes, LIMIT).is_err(), "{}", bytes.escape_ascii());
    }
}

#[test]
fn each_byte_is_searched_once() {
    const BYTES: usize = 1000;
    let mut replies = Replies::new();
    for n in 0..BYTES {
        let mut byte = if n == 0 { &b"+"[..] } else { b"x" };
        replies.fill(Limit::Fixed(LIMIT), &mut byte).unwrap();
        assert_eq!(replies.next(Limit::Fixed(LIMIT)), Ok(None));
    }
    // The search reads the last byte again, which may be the first byte of a line end.
    assert!(replies.frame.bytes_searched <= 2 * BYTES);
}

#[test]
fn a_buffer_is_twice_what_came_at_most() {
    // The limit is no power of two, so doubling alone would exceed it.
    let limit = 100_000;
    for bytes in [
        [&b"+"[..], &vec![b'x'; limit]].concat(),
        [&b"$90000\r\n"[..], &vec![b'x'; 89_000]].concat(),
    ] {
        // `read_all` asserts the bound.
        read_all(&bytes, &[1000], limit);
    }
}

#[test]
fn a_dropped_string_is_waited_for() {
    let limit = Limit::Fixed(LIMIT);
    let mut replies = Replies::new();
    let string = format!("${LIMIT}\r\n{}", "x".repeat(LIMIT));
    let mut source = string.as_bytes();
    while !source.is_empty() {
        assert_eq!(replies.next(limit), Ok(None));
        replies.fill(limit, &mut source).unwrap();
    }
    assert_eq!(replies.next(limit), Ok(None));
    assert!(replies.has_partial_reply());
    replies.fill(limit, &b"\r\n"[..]).unwrap();
    let error = replies.next(limit);
    assert!(
        matches!(error, Ok(Some(Value::ServerError(_)))),
        "{error:?}"
    );
}

#[test]
fn a_long_buffer_is_given_back() {
    let len = 4 * LONGEST_BUFFER;
    let bytes = [
        format!("${len}\r\n").as_bytes(),
        &vec![b'x'; len],
        b"\r\n:1\r\n",
    ]
    .concat();
    let (mut replies, limit) = (Replies::new(), Limit::Fixed(1 << 20));
    let (mut source, mut longest) = (&bytes[..], 0);
    while !source.is_empty() {
        assert_eq!(replies.next(limit), Ok(None));
        replies.fill(limit, &mut source).unwrap();
        longest = longest.max(replies.buffer.len());
    }
    assert!(longest >= len);
    let both = [replies.next(limit), replies.next(limit)];
    assert!(matches!(
        both,
        [Ok(Some(Value::BulkString(_))), Ok(Some(Value::Int(1)))]
    ));
    assert_eq!(replies.buffer.len(), BUFFER);
}

/// Only the reply to a queued command is read as `OK`. The same text in a caller's own reply stays.
#[test]
fn only_a_whole_reply_queued_is_read_as_ok() {
    let read = |bytes: &[u8]| first(bytes, LIMIT).unwrap().unwrap();
    assert_eq!(read(b"+QUEUED\r\n"), Value::Okay);
    let queued = || Value::SimpleString("QUEUED".to_owned());
    assert_eq!(
        read(b"*2\r\n+QUEUED\r\n+QUEUED\r\n"),
        Value::Array(vec![queued(), queued()])
    );
}
