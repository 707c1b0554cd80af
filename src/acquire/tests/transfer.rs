//! Tests of transfers. An adoption is repeated in an outage, but not after a refusal.

use super::*;
use crate::lease::Ticket;
use crate::util::id::HolderId;

fn ticket() -> Ticket {
    Ticket {
        key: key(),
        lease: LeaseId::random(),
        token: 7,
        options: OPTIONS,
        key_left: OPTIONS.ttl,
    }
}

#[test]
fn adoption_outlasts_an_outage() {
    let f = fixture();
    let expires_in = OPTIONS.ttl;
    f.answer_after(Duration::ZERO, Err(error(ErrorKind::Unavailable)));
    f.answer_after(
        Duration::ZERO,
        Ok(Reply::Adopted {
            expires_in,
            token: 7,
        }),
    );
    assert_eq!(f.acquirer.adopt(&ticket()).unwrap().grant().token, 7);
}

#[test]
fn adoption_ends_after_the_outage_timeout() {
    let f = fixture();
    f.answer_after(OUTAGE_TIMEOUT, Err(error(ErrorKind::Unavailable)));
    let outage = f.acquirer.adopt(&ticket()).map(drop).unwrap_err();
    assert_eq!(outage.kind(), ErrorKind::Unavailable);
}

#[test]
fn refused_adoption_is_not_repeated() {
    let f = fixture();
    f.answer_after(Duration::ZERO, Ok(Reply::Missing));
    let gone = f.acquirer.adopt(&ticket()).map(drop).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotHeld);
    let by = Some(HolderId::of_text("host/1/0"));
    f.answer_after(Duration::ZERO, Ok(Reply::Taken { by }));
    let taken = f.acquirer.adopt(&ticket()).map(drop).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::NotHeld);
    assert!(taken.to_string().contains("host/1/0"), "{taken}");
}
