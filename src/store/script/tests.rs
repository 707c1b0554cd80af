//! What goes over the wire, and what is made of what comes back.

use redis::Value;

use super::encode::decimal;
use super::*;
use crate::clock::Moment;
use crate::error::ErrorKind;
use crate::id::LeaseId;
use crate::key::Key;
use crate::store::command::Reply;
use crate::store::value;

fn names() -> Names {
    Names {
        holder: HolderId::of_this_process(),
        fence_counter: "p:~fence".to_owned(),
    }
}

#[test]
fn a_call_is_what_redis_reads() {
    let key = Key::new("p:", "a", 10).unwrap();
    let lease = LeaseId::random();
    let until = Moment::now();
    let command = Command::Release {
        key,
        lease,
        until,
        held: None,
        queued: None,
    };
    let mut buffer = Vec::new();
    let call = Call::Text("return 1");
    encode(
        &mut buffer,
        call,
        Kind::Release,
        &names(),
        [&command].into_iter(),
    );
    let wanted = format!(
        "*7\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n3\r\n$8\r\np:~fence\r\n$3\r\np:a\r\n\
         $10\r\np:~queue:a\r\n$32\r\n{lease}\r\n"
    );
    assert_eq!(String::from_utf8(buffer).unwrap(), wanted);
}

#[test]
fn numbers_are_written_in_decimal() {
    for number in [0, 7, 10, 30_000, u64::MAX] {
        let (digits, start) = decimal(number);
        assert_eq!(&digits[start..], number.to_string().as_bytes());
    }
}

#[test]
fn an_answer_of_the_wrong_shape_is_nonsense() {
    for value in [Value::Okay, Value::Array(vec![Value::Int(1)]), Value::Nil] {
        let decoded = decode(Kind::Acquire, 1, value);
        assert!(matches!(decoded, Decoded::Nonsense(_)));
    }
    let short = Value::Array(vec![Value::Int(1)]);
    assert!(matches!(
        decode(Kind::Release, 2, short),
        Decoded::Nonsense(_)
    ));
    for (kind, one_for_two) in [
        (Kind::Release, 0),
        (Kind::Acquire, 1),
        (Kind::Adopt, 1),
        (Kind::Write, 1),
    ] {
        let decoded = decode(kind, 2, Value::Int(one_for_two));
        assert!(matches!(decoded, Decoded::Nonsense(_)), "{kind:?}");
    }
}

#[test]
fn one_answer_can_be_all_that_there_is_to_say() {
    let outcomes = |kind, value| match decode(kind, 3, value) {
        Decoded::Outcomes(outcomes) => outcomes.into_iter().map(Result::unwrap).collect(),
        _ => Vec::new(),
    };
    for kind in [Kind::Release, Kind::Renew] {
        assert_eq!(outcomes(kind, Value::Int(1)), vec![Reply::Done; 3]);
    }
    let micros = [0, 1, 2].map(|n| (1_700_000_000_000_000_u64 + n).to_string());
    let granted = [&micros[0], &micros[1], &micros[2]].map(|micros| Reply::Granted {
        token: value::token(micros).unwrap(),
    });
    let first = Value::BulkString(micros[0].clone().into_bytes());
    assert_eq!(outcomes(Kind::Acquire, first), granted);
}

#[test]
fn no_token_follows_the_greatest_one() {
    let last = || Value::BulkString(b"18014398509481983".to_vec());
    assert!(matches!(
        decode(Kind::Acquire, 1, last()),
        Decoded::Outcomes(_)
    ));
    assert!(matches!(
        decode(Kind::Acquire, 2, last()),
        Decoded::Nonsense(_)
    ));
}

fn answer(wire: &str) -> Value {
    redis::parse_redis_value(wire.as_bytes()).unwrap()
}

#[test]
fn errors_of_a_script_are_read_in_the_words_of_every_version() {
    for wire in [
        "-OOM command not allowed\r\n",
        "-@user_script: 18: -OOM command not allowed\r\n",
    ] {
        let Decoded::Outcomes(outcomes) = decode(Kind::Acquire, 1, answer(wire)) else {
            panic!("{wire}");
        };
        let error = outcomes[0].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

#[test]
fn a_refusal_in_a_script_leaves_nothing_in_doubt() {
    for wire in [
        "-@user_script: 1: The user executing the script can't run this command or subcommand\r\n",
        "-ERR The user executing the script can't run this command or subcommand\r\n",
        "-ERR ACL failure in script: User x has no permissions to run the 'set' command\r\n",
    ] {
        let Decoded::Outcomes(outcomes) = decode(Kind::Acquire, 2, answer(wire)) else {
            panic!("{wire}");
        };
        let kinds = outcomes.into_iter().map(|one| one.unwrap_err().kind());
        assert_eq!(kinds.collect::<Vec<_>>(), [ErrorKind::Denied; 2], "{wire}");
    }
}

#[test]
fn an_unreadable_result_is_an_error_of_its_key() {
    for (kind, found) in [
        (Kind::Write, "18446744073709551616"),
        (Kind::Write, ""),
        (Kind::Acquire, "not a number"),
        (Kind::Acquire, "18014398509481984"),
    ] {
        let results = [Value::BulkString(found.into()), Value::Int(1)];
        let Decoded::Outcomes(outcomes) = decode(kind, 2, Value::Array(results.to_vec())) else {
            panic!("{kind:?}: {found:?}");
        };
        let error = outcomes[0].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        let text = error.to_string();
        assert!(found.is_empty() || !text.contains(found), "{text}");
        assert!(outcomes[1].is_ok());
    }
    let endless = Value::BulkString(vec![0xff; 1 << 20]);
    let Decoded::Outcomes(outcomes) = decode(Kind::Write, 1, endless) else {
        panic!("one outcome");
    };
    let error = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(error.len() < 2000, "{}", error.len());
    // One result can stand for a whole batch: then nobody's data is in it.
    let one_for_two = decode(Kind::Acquire, 2, Value::BulkString(b"not a number".into()));
    assert!(matches!(one_for_two, Decoded::Nonsense(_)));
}

#[test]
fn one_demoted_primary_in_a_batch_is_enough_to_look_elsewhere() {
    let refusal = "-READONLY You can't write against a read only replica.\r\n";
    for wire in [format!("*2\r\n:0\r\n{refusal}"), refusal.to_owned()] {
        assert!(is_out_of_place(&answer(&wire)), "{wire}");
    }
}

#[test]
fn an_error_that_is_not_of_redis_leaves_what_was_done_in_doubt() {
    let decoded = decode(Kind::Acquire, 1, answer("-upstream failure\r\n"));
    assert!(matches!(decoded, Decoded::Doubtful(_)));
}

#[test]
fn a_batch_refused_for_one_of_its_keys_is_taken_apart() {
    let refused = || answer("-NOPERM No permissions to access a key\r\n");
    assert!(matches!(
        decode(Kind::Acquire, 2, refused()),
        Decoded::Apart
    ));
    assert!(matches!(
        decode(Kind::Acquire, 1, refused()),
        Decoded::Outcomes(_)
    ));
}
