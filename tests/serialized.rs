//! The text that the feature `serde` writes and reads.
#![cfg(feature = "serde")]
#![allow(clippy::unwrap_used)]

use leasehold::{ErrorKind, HolderId, LossReason, MemoryStore};
use serde_json::{Value, from_value, json, to_value};

#[test]
fn lock_info_is_written_without_its_ticket() {
    let client = MemoryStore::new().client().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let found = client.mutex("k").inspect().unwrap().unwrap();
    let mut written = to_value(&found).unwrap();
    let left = written.as_object_mut().unwrap().remove("expires_in_ms");
    assert!((1..=30_000).contains(&left.as_ref().and_then(Value::as_u64).unwrap()));
    let expected = json!({
        "holder": client.holder_id().as_str(),
        "fencing_token": guard.fencing_token().to_string(),
        "clients_waiting": 0,
    });
    assert_eq!(written, expected);
}

#[test]
fn holders_are_text_and_checked_when_read() {
    let holder = MemoryStore::new().client().unwrap().holder_id().clone();
    let written = to_value(&holder).unwrap();
    assert_eq!(written, json!(holder.as_str()));
    assert_eq!(from_value::<HolderId>(written).unwrap(), holder);
    for bad in ["", "a b", "a\n", &"x".repeat(129)] {
        assert!(from_value::<HolderId>(json!(bad)).is_err(), "{bad:?}");
    }
}

#[test]
fn reasons_and_kinds_are_read_as_written() {
    let by: HolderId = from_value(json!("host/1/a")).unwrap();
    let reasons = [
        (LossReason::Deleted, json!("Deleted")),
        (
            LossReason::ForceUnlocked { by: by.clone() },
            json!({"ForceUnlocked": {"by": "host/1/a"}}),
        ),
        (
            LossReason::TakenOver { by: Some(by) },
            json!({"TakenOver": {"by": "host/1/a"}}),
        ),
        (
            LossReason::TakenOver { by: None },
            json!({"TakenOver": {"by": null}}),
        ),
    ];
    for (reason, text) in reasons {
        assert_eq!(to_value(&reason).unwrap(), text);
        assert_eq!(from_value::<LossReason>(text).unwrap(), reason);
    }
    let kind = ErrorKind::LeaseLost;
    assert_eq!(to_value(kind).unwrap(), json!("LeaseLost"));
    assert_eq!(from_value::<ErrorKind>(json!("LeaseLost")).unwrap(), kind);
}
