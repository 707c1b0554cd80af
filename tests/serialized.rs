//! The text that the feature `serde` writes and reads.
#![cfg(feature = "serde")]
#![allow(clippy::unwrap_used)]

use std::time::UNIX_EPOCH;

use leasehold::{ErrorKind, HolderId, LossReason, MemoryStore};
use serde_json::{Value, from_value, json, to_value};

#[test]
fn lock_info_is_written_without_its_ticket() {
    let client = MemoryStore::new().client().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let found = client.mutex("k").inspect().unwrap().unwrap();
    let mut written = to_value(&found).unwrap();
    remove_times(&mut written);
    let (holder, token) = (
        client.holder_id().as_str(),
        guard.fencing_token().to_string(),
    );
    let granted_at = found.holders()[0].granted_at().unwrap();
    let granted_at = granted_at.duration_since(UNIX_EPOCH).unwrap();
    let expected = json!({
        "holder": holder,
        "fencing_token": token,
        "holders": [{
            "kind": "exclusive", "holder": holder, "id": null, "weight": null, "limit": null, "fencing_token": token,
            "granted_at_ms": u64::try_from(granted_at.as_millis()).unwrap(),
        }],
        "clients_waiting": 0,
    });
    assert_eq!(written, expected);
}

/// Removes the times until holders expire.
fn remove_times(written: &mut Value) {
    match written {
        Value::Object(fields) => {
            if let Some(left) = fields.remove("expires_in_ms") {
                assert!((1..=30_000).contains(&left.as_u64().unwrap()));
            }
            fields.values_mut().for_each(remove_times);
        }
        Value::Array(parts) => parts.iter_mut().for_each(remove_times),
        _ => {}
    }
}

#[test]
fn shares_are_written_with_their_kind() {
    let client = MemoryStore::new().client().unwrap();
    let (lock, semaphore) = (client.rw_lock("r"), client.semaphore("s", 8).weight(3));
    let (reader, permit) = (lock.read().unwrap(), semaphore.acquire().unwrap());
    let holder = client.holder_id().as_str();
    let mut written = [
        to_value(lock.inspect().unwrap()).unwrap(),
        to_value(semaphore.inspect().unwrap()).unwrap(),
    ];
    written.iter_mut().for_each(remove_times);
    let expected = [
        json!({
            "holders": [{
                "kind": "reader", "holder": holder, "id": reader.id(), "weight": null, "limit": null,
                "fencing_token": null, "granted_at_ms": null,
            }],
            "readers": 1,
            "clients_waiting": 0,
        }),
        json!({
            "holders": [{
                "kind": "permits", "holder": holder, "id": permit.id(), "weight": 3, "limit": 8, "fencing_token": null,
                "granted_at_ms": null,
            }],
            "taken": 3,
            "available": 5,
            "clients_waiting": 0,
        }),
    ];
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
