//! Tests of each check, with records made by hand: violations that it must find, and correct records in which it must
//! find nothing.

use std::time::Duration;

use leasehold_testbed::terms::Share;

use crate::checks::{Sighting, all, keys_without_holders, overrun};
use crate::faults::{Effect, Fault, Kind};
use crate::history::{History, Stops};
use crate::messages::{KEYS, MIN_HOLD, PACED, account_keys, paced_key, runs_key};
use crate::records::{Doing, Grant, Observed, Outcome, Record, What, Who};
use crate::value::GrantId;

const MILLI: u64 = 1_000_000;
const TTL: u64 = 1000;

/// The records of one thread; times are in ms.
struct Thread {
    who: Who,
    records: Vec<Record>,
}

fn thread(process: usize) -> Thread {
    let (life, thread) = (0, 0);
    Thread {
        who: Who {
            process,
            life,
            thread,
        },
        records: Vec::new(),
    }
}

impl Thread {
    fn at(mut self, millis: u64, what: What) -> Self {
        let (at, who) = (millis * MILLI, self.who);
        self.records.push(Record { at, who, what });
        self
    }

    fn calls(self, millis: u64, doing: Doing, allowed: Option<u64>) -> Self {
        let key = Some(0);
        self.at(
            millis,
            What::Called {
                doing,
                key,
                allowed,
            },
        )
    }

    fn returns(self, since: u64, millis: u64, outcome: Outcome) -> Self {
        let since = since * MILLI;
        self.at(millis, What::Returned { since, outcome })
    }

    fn granted(self, asked: u64, granted: u64, grant: Grant) -> Self {
        self.calls(asked, Doing::Lock, None)
            .returns(asked, granted, Outcome::Done)
            .at(granted, What::Held(grant))
    }

    /// Requests the lock and gets it at once, with a validity of `TTL`.
    fn holds(self, from: u64, token: u64) -> Self {
        self.granted(from, from, grant(token)).sees(from, TTL)
    }

    fn sees(self, millis: u64, left: u64) -> Self {
        let left = left * MILLI;
        self.at(millis, What::Seen { left })
    }

    fn identified(self, millis: u64, lease: &str) -> Self {
        let lease = lease.to_owned();
        self.at(millis, What::Identified { lease })
    }

    fn lets_go(self, millis: u64) -> Self {
        self.at(millis, What::Releasing)
    }

    fn reported(self, millis: u64, reason: &str) -> Self {
        let reason = reason.to_owned();
        let key = None;
        self.at(millis, What::Lost { reason, key })
    }
}

/// A grant with the µs part `token`, and no hand-offs.
fn grant(token: u64) -> Grant {
    Grant {
        key: 0,
        token: token << 10,
        share: Share::Alone,
        ttl: TTL,
        at_most: None,
    }
}

fn fault(from: u64, to: u64, effect: Effect) -> Fault {
    Fault {
        kind: Kind::KeyDeleted,
        from: from * MILLI,
        to: to * MILLI,
        effect,
    }
}

/// The grant in a value with these µs.
fn scripted(micros: u64) -> GrantId {
    GrantId {
        lease: format!("of {micros}"),
        micros: Some(micros),
    }
}

/// The grant in a value that plain commands have written.
fn plain(lease: &str) -> GrantId {
    GrantId {
        lease: lease.to_owned(),
        micros: None,
    }
}

fn loses(from: u64, to: u64, micros: u64) -> Fault {
    loses_grant(from, to, scripted(micros))
}

fn loses_grant(from: u64, to: u64, grant: GrantId) -> Fault {
    let (key, grant) = (Some(0), Some(grant));
    fault(from, to, Effect::Loses { key, grant })
}

fn loses_all(from: u64, to: u64) -> Fault {
    let (key, grant) = (None, None);
    fault(from, to, Effect::Loses { key, grant })
}

fn history<const N: usize>(threads: [Thread; N], faults: &[Fault]) -> History {
    let records: Vec<Record> = threads.into_iter().flat_map(|one| one.records).collect();
    History::new(&records, faults)
}

/// The first lines of the findings.
fn found<const N: usize>(threads: [Thread; N], faults: &[Fault]) -> Vec<String> {
    let (violations, _) = all(&history(threads, faults), faults);
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    violations.iter().map(|one| first(&one.text)).collect()
}

const NOTHING: [&str; 0] = [];
const OVERLAP: &str = "two holders at the same time:";

#[test]
fn consecutive_holds_are_correct() {
    let one = thread(0).holds(0, 1).lets_go(10);
    let two = thread(1).holds(10, 2).lets_go(20).holds(25, 3);
    assert_eq!(found([one, two], &[]), NOTHING);
}

#[test]
fn two_overlapping_holds_are_found() {
    let one = thread(0).holds(0, 1).lets_go(10);
    let two = thread(1).holds(9, 2).lets_go(20);
    assert_eq!(found([one, two], &[]), [OVERLAP]);
}

#[test]
fn a_hold_lasts_until_its_last_known_validity() {
    let stopped = || thread(0).holds(0, 1).sees(500, TTL);
    let two = |at| thread(1).holds(at, 2);
    assert_eq!(found([stopped(), two(1499)], &[]), [OVERLAP]);
    assert_eq!(found([stopped(), two(1500)], &[]), NOTHING);
    let reported = stopped().reported(1200, "Expired");
    assert_eq!(found([reported, two(1300)], &[]), NOTHING);
}

#[test]
fn a_long_overlap_is_found_behind_short_holds() {
    let long = thread(0).holds(0, 1).lets_go(100);
    let short = thread(1).holds(20, 2).lets_go(30);
    let last = thread(2).holds(90, 3).lets_go(95);
    assert_eq!(found([long, short, last], &[]), [OVERLAP, OVERLAP]);
}

#[test]
fn a_grant_never_observed_is_no_hold() {
    let late = thread(0)
        .granted(0, 50, grant(1))
        .reported(51, "Expired")
        .lets_go(52);
    let other = thread(1).holds(40, 2).lets_go(60);
    assert_eq!(found([late, other], &[]), NOTHING);
}

#[test]
fn a_grant_that_was_deleted_excuses_the_next_one() {
    let one = || {
        thread(0)
            .holds(0, 1)
            .sees(60, TTL - 60)
            .reported(80, "Deleted")
    };
    let two = || thread(1).holds(50, 2).lets_go(70);
    assert_eq!(found([one(), two()], &[loses(40, 41, 1)]), NOTHING);
    assert_eq!(found([one(), two()], &[loses_all(40, 41)]), NOTHING);
    // In the first case, another grant was deleted. In the second, the deletion came too late to allow the next grant.
    assert!(found([one(), two()], &[loses(40, 41, 7)]).contains(&OVERLAP.to_owned()));
    assert!(found([one(), two()], &[loses(51, 52, 1)]).contains(&OVERLAP.to_owned()));
}

#[test]
fn a_forced_unlock_excuses_the_next_grant() {
    let (key, since) = (0, 20 * MILLI);
    let forced = |grant| thread(2).at(30, What::Forced { key, since, grant });
    let one = || {
        thread(0)
            .holds(0, 1)
            .sees(60, TTL - 60)
            .reported(80, "ForceUnlocked")
    };
    let two = |at| thread(1).holds(at, 2).lets_go(70);
    let scripted = || forced(Some(scripted(1)));
    assert_eq!(found([one(), two(50), scripted()], &[]), NOTHING);
    assert_eq!(found([one(), two(19), scripted()], &[]), [OVERLAP]);
    // The reply to `force_unlock` was lost: it may have ended any grant.
    assert_eq!(found([one(), two(50), forced(None)], &[]), NOTHING);
    let plain = || forced(Some(plain("a")));
    let named = |lease| one().identified(1, lease);
    assert_eq!(found([named("a"), two(50), plain()], &[]), NOTHING);
    let none = "a loss was reported without a cause:";
    assert_eq!(found([named("b"), two(50), plain()], &[]), [OVERLAP, none]);
    // The lease of the first holder is not known.
    assert_eq!(found([one(), two(50), plain()], &[]), NOTHING);
}

#[test]
fn a_lost_grant_without_a_token_is_found_by_its_lease() {
    let late = "held beyond its ttl after Redis lost it:";
    let one = |renewed| thread(0).holds(0, 1).sees(renewed, TTL);
    let lost = [loses_grant(40, 41, plain("a"))];
    assert_eq!(found([one(41).identified(41, "a")], &lost), NOTHING);
    assert_eq!(found([one(42).identified(42, "a")], &lost), [late]);
    // These may be other grants.
    assert_eq!(found([one(42).identified(42, "b")], &lost), NOTHING);
    assert_eq!(found([one(42)], &lost), NOTHING);
}

#[test]
fn holds_of_one_grant_share_the_lease() {
    let handed_off = Grant {
        token: grant(1).token + 1,
        ..grant(1)
    };
    let one = thread(0).holds(0, 1).identified(5, "a").lets_go(10);
    let two = thread(1).granted(0, 10, handed_off).sees(10, TTL);
    let three = thread(2).holds(20, 2);
    let history = history([one, two, three], &[]);
    let leases = history.holds.iter().map(|hold| hold.lease.as_deref());
    let leases: Vec<Option<&str>> = leases.collect();
    assert_eq!(leases, [Some("a"), Some("a"), None]);
}

#[test]
fn a_forgotten_guard_holds_at_most_its_ttl() {
    let late = "held beyond its ttl after Redis lost it:";
    let one = |renewed| thread(0).holds(0, 1).sees(renewed, TTL);
    for lost in [loses(40, 41, 1), loses_all(40, 41)] {
        assert_eq!(found([one(41)], std::slice::from_ref(&lost)), NOTHING);
        assert_eq!(found([one(42)], &[lost]), [late]);
    }
}

#[test]
fn a_grant_after_a_data_loss_still_counts() {
    let one = thread(0).holds(45, 1).sees(900, TTL);
    assert_eq!(found([one], &[loses_all(40, 50)]), NOTHING);
}

#[test]
fn an_unexplained_loss_is_found() {
    let reported = |reason| thread(0).holds(0, 1).reported(80, reason);
    let none = "a loss was reported without a cause:";
    assert_eq!(found([reported("Deleted")], &[]), [none]);
    assert_eq!(found([reported("TakenOver")], &[]), [none]);
    assert_eq!(found([reported("Expired")], &[]), NOTHING);
    assert_eq!(found([reported("Deleted")], &[loses(40, 41, 1)]), NOTHING);
    assert_eq!(found([reported("Deleted")], &[loses(81, 82, 1)]), [none]);
    let in_time = thread(0).holds(0, 1).reported(TTL, "Deleted");
    assert_eq!(found([in_time], &[]), NOTHING, "its time had passed");
}

#[test]
fn tokens_that_fall_are_found() {
    let one = || thread(0).holds(0, 5).lets_go(10);
    let two = |token| thread(1).holds(20, token).lets_go(30);
    let fell = [
        "a later request got a smaller token:",
        "a later hold had a smaller token:",
    ];
    assert_eq!(found([one(), two(4)], &[]), fell);
    assert_eq!(found([one(), two(5)], &[]), fell);
    // A later request has no excuse, even if Redis lost everything.
    assert_eq!(found([one(), two(4)], &[loses_all(15, 25)]), fell[..1]);
}

#[test]
fn tokens_must_rise_with_the_hold_times() {
    let early = thread(0).granted(0, 0, grant(5)).sees(0, TTL).lets_go(10);
    let waited = thread(1).granted(0, 20, grant(4)).sees(20, TTL).lets_go(30);
    assert_eq!(
        found([early, waited], &[]),
        ["a later hold had a smaller token:"]
    );
}

#[test]
fn a_hold_beyond_its_ttl_is_found() {
    let limited = |left| {
        let grant = Grant {
            at_most: Some(100),
            ..grant(1)
        };
        thread(0).granted(0, 10, grant).sees(20, left)
    };
    assert_eq!(found([limited(90)], &[]), NOTHING);
    assert_eq!(found([limited(91)], &[]), ["held beyond its limit:"]);
}

#[test]
fn a_deadline_overrun_is_found_unless_stopped() {
    let slow = || {
        thread(0)
            .calls(0, Doing::TryLockFor, Some(400))
            .returns(0, 12_000, Outcome::Done)
    };
    assert_eq!(found([slow()], &[]), ["the deadline was overrun by 11.6s:"]);
    let stopped = |process| fault(1000, 4000, Effect::Stops { process });
    assert_eq!(found([slow()], &[stopped(0)]), NOTHING);
    assert_eq!(found([slow()], &[stopped(1)]).len(), 1);
    let faults = [stopped(0)];
    let history = history([slow()], &faults);
    let overrun = overrun(&history.calls[0], &Stops(&faults));
    assert_eq!(overrun, Some(Duration::from_millis(8600)));
}

#[test]
fn a_starved_waiter_is_found() {
    let waits = |millis| {
        thread(0)
            .calls(0, Doing::Lock, None)
            .returns(0, millis, Outcome::Done)
    };
    assert_eq!(found([waits(60_001)], &[]), ["waited for 60.001s:"]);
    assert_eq!(found([waits(60_000)], &[]), NOTHING);
}

#[test]
fn an_endless_call_is_found_unless_killed() {
    let hangs = || thread(0).calls(0, Doing::Lock, None);
    let killed = |life| fault(5, 6, Effect::Kills { process: 0, life });
    assert_eq!(found([hangs()], &[]), ["a call never ended:"]);
    assert_eq!(found([hangs()], &[killed(0)]), NOTHING);
    assert_eq!(found([hangs()], &[killed(1)]).len(), 1);
}

#[test]
fn an_error_that_no_fault_explains_is_found() {
    let fails = |doing, kind: &str| {
        let failed = Outcome::Failed(kind.to_owned());
        thread(0).calls(0, doing, None).returns(0, 1, failed)
    };
    for (doing, kind) in [
        (Doing::Lock, "Unavailable"),
        (Doing::Unlock, "LeaseLost"),
        (Doing::Adopt, "NotHeld"),
    ] {
        assert_eq!(found([fails(doing, kind)], &[]), NOTHING);
    }
    for (doing, kind) in [
        (Doing::Lock, "Protocol"),
        (Doing::Lock, "LeaseLost"),
        (Doing::TryLock, "Cancelled"),
    ] {
        assert_eq!(
            found([fails(doing, kind)], &[]).len(),
            1,
            "{doing:?} {kind}"
        );
    }
}

#[test]
fn an_error_noted_by_a_thread_is_found() {
    let saw = thread(0).at(1, What::Wrong("pigs fly".to_owned()));
    assert!(found([saw], &[])[0].ends_with("saw that pigs fly"));
}

/// A switch-over, guards dropped in an outage, and contention do not make Redis lose anything.
#[test]
fn a_fault_without_an_effect_excuses_nothing() {
    let one = || {
        thread(0)
            .holds(0, 1)
            .sees(60, TTL - 60)
            .reported(80, "Deleted")
    };
    let two = || thread(1).holds(50, 2).lets_go(70);
    let none = || [fault(40, 90, Effect::None)];
    assert_eq!(
        found([one()], &none()),
        ["a loss was reported without a cause:"]
    );
    assert!(found([one(), two()], &none()).contains(&OVERLAP.to_owned()));
}

/// The key 0 may have lost grants and writes between these times.
fn may_lose(from: u64, to: u64) -> Fault {
    fault(from, to, Effect::MayLose { keys: vec![0, 7] })
}

#[test]
fn a_fail_over_explains_two_holders_of_its_keys_for_a_ttl() {
    let one = || thread(0).holds(0, 1).lets_go(900);
    let two = || thread(1).holds(50, 2);
    let explained = |faults: &[Fault]| all(&history([one(), two()], faults), faults).1.lost;
    assert_eq!(found([one(), two()], &[may_lose(20, 60)]), NOTHING);
    assert_eq!(explained(&[may_lose(20, 60)]), 1);
    assert_eq!(found([one(), two()], &[may_lose(60, 80)]), [OVERLAP]);
    let others = fault(20, 60, Effect::MayLose { keys: vec![7] });
    assert_eq!(found([one(), two()], &[others]), [OVERLAP]);
    // The first holder goes on for longer than a ttl.
    let long = || thread(0).holds(0, 1).sees(1000, TTL);
    assert_eq!(found([long(), two()], &[may_lose(20, 60)]), [OVERLAP]);
}

impl Thread {
    fn writes(self, since: u64, at: u64, token: u64) -> Self {
        let (key, since) = (0, since * MILLI);
        self.at(at, What::Written { key, token, since })
    }
}

#[test]
fn a_stale_write_is_found() {
    let stale = ["a stale write was accepted:"];
    let later = |from, to| [thread(0).writes(10, 20, 5), thread(1).writes(from, to, 4)];
    assert_eq!(found(later(21, 30), &[]), stale);
    // It may have come first.
    assert_eq!(found(later(19, 30), &[]), NOTHING);
    let rising = [thread(0).writes(10, 20, 5), thread(1).writes(21, 30, 5)];
    assert_eq!(found(rising, &[]), NOTHING);
}

#[test]
fn a_fail_over_explains_the_loss_of_the_last_writes() {
    let late = |at| [thread(0).writes(10, 20, 5), thread(1).writes(at, at + 1, 4)];
    let stale = ["a stale write was accepted:"];
    assert_eq!(found(late(30), &[may_lose(15, 40)]), NOTHING);
    assert_eq!(found(late(30), &[may_lose(32, 40)]), stale);
    // The replica had the first write long before.
    assert_eq!(found(late(9_000), &[may_lose(8_000, 8_500)]), stale);
    assert_eq!(found(late(9_000), &[loses_all(8_000, 8_500)]), NOTHING);
    // The deletion of a lock loses no value.
    assert_eq!(found(late(30), &[loses(15, 25, 1)]), stale);
}

/// This grant was seen from the start to `last`.
fn sighting(grant: GrantId, last: u64) -> Sighting {
    Sighting {
        key: 0,
        name: "leasehold:k".to_owned(),
        grant,
        first: 0,
        last: last * MILLI,
    }
}

/// The number of keys without holders.
fn orphans<const N: usize>(threads: [Thread; N], seen: &[Sighting], faults: &[Fault]) -> usize {
    let longest = Duration::from_secs(4);
    keys_without_holders(seen, longest, &history(threads, faults), faults).len()
}

#[test]
fn a_key_without_a_holder_is_found_after_its_ttl() {
    let finds = |thread: Thread, micros, last, faults: &[Fault]| {
        orphans([thread], &[sighting(scripted(micros), last)], faults)
    };
    let released = || thread(0).holds(0, 1).lets_go(500);
    // One ttl after the release, and 2 s for a busy machine.
    assert_eq!(finds(released(), 1, 3_400, &[]), 0);
    assert_eq!(finds(released(), 1, 3_600, &[]), 1);
    // While the holder lives, its key stays.
    assert_eq!(finds(thread(0).holds(0, 1), 1, 60_000, &[]), 0);
    let killed = fault(
        400,
        500,
        Effect::Kills {
            process: 0,
            life: 0,
        },
    );
    assert_eq!(finds(thread(0).holds(0, 1), 1, 3_600, &[killed]), 1);
    // No caller got this grant.
    assert_eq!(finds(released(), 9, 5_900, &[]), 0);
    assert_eq!(finds(released(), 9, 6_100, &[]), 1);
    // The last renewal waited in a stopped server.
    let mut stopped = fault(400, 1_500, Effect::None);
    stopped.kind = Kind::MasterStopped;
    assert_eq!(finds(released(), 1, 3_600, &[stopped]), 0);
}

#[test]
fn keys_without_tokens_are_told_apart_by_their_leases() {
    let first = || thread(0).holds(0, 1).lets_go(500);
    let second = || thread(1).holds(9_000, 2);
    let seen = |lease, last| [sighting(plain(lease), last)];
    let named = || [first().identified(1, "a"), second().identified(9_001, "b")];
    assert_eq!(orphans(named(), &seen("a", 3_400), &[]), 0);
    assert_eq!(orphans(named(), &seen("a", 3_600), &[]), 1);
    assert_eq!(orphans(named(), &seen("b", 60_000), &[]), 0);
    // No caller got this grant.
    assert_eq!(orphans(named(), &seen("c", 5_900), &[]), 0);
    assert_eq!(orphans(named(), &seen("c", 6_100), &[]), 1);
    // The server has granted the lock to the lease once more, after the end of its wait.
    let again = GrantId {
        micros: Some(7),
        ..plain("a")
    };
    let late = |first: u64, last: u64| {
        let first = first * MILLI;
        [Sighting {
            first,
            ..sighting(again.clone(), last)
        }]
    };
    assert_eq!(orphans(named(), &late(4_000, 9_900), &[]), 0);
    assert_eq!(orphans(named(), &late(4_000, 10_100), &[]), 1);
    // No thread saw its lease id, so the hold of that time may be of the grant. A later hold is not.
    let unnamed = || [first(), second()];
    assert_eq!(orphans(unnamed(), &seen("a", 3_400), &[]), 0);
    assert_eq!(orphans(unnamed(), &seen("a", 3_600), &[]), 1);
    assert_eq!(orphans(unnamed(), &seen("a", 9_001), &[]), 0);
    let other = || [first(), second().identified(9_001, "b")];
    assert_eq!(orphans(other(), &seen("a", 9_001), &[]), 1);
}

const READER: Share = Share::Reader;

fn permits(weight: u32) -> Share {
    Share::Permits { weight, limit: 3 }
}

impl Thread {
    /// Requests a share of the lease `lease`, and gets it at once, with a validity of `TTL`.
    fn shares(self, from: u64, share: Share, token: u64, lease: &str) -> Self {
        let grant = Grant {
            share,
            ..grant(token)
        };
        let shares = self.granted(from, from, grant);
        shares.identified(from, lease).sees(from, TTL)
    }

    /// Requests a permit with a shortest hold.
    fn starts(self, asked: u64, granted: u64) -> Self {
        let (share, limit) = (permits(1), PACED);
        assert_eq!(share, Share::Permits { weight: 1, limit });
        let grant = Grant {
            key: paced_key(),
            share,
            ..grant(0)
        };
        self.granted(asked, granted, grant).lets_go(granted)
    }
}

#[test]
fn shares_that_fit_together_are_correct() {
    let readers = [
        thread(0).shares(0, READER, 1, "a").lets_go(30),
        thread(1).shares(5, READER, 2, "b").lets_go(30),
        // This reader joins the lease of its client.
        thread(0).shares(6, READER, 1, "a").lets_go(40),
        thread(2).holds(40, 3).lets_go(50),
        thread(1).shares(50, READER, 4, "c"),
    ];
    assert_eq!(found(readers, &[]), NOTHING);
    let three = [
        thread(0).shares(0, permits(2), 0, "a").lets_go(30),
        thread(1).shares(5, permits(1), 0, "b").lets_go(40),
        thread(2).shares(30, permits(2), 0, "c").lets_go(40),
        thread(2).holds(40, 3),
    ];
    assert_eq!(found(three, &[]), NOTHING);
}

#[test]
fn shares_that_do_not_fit_together_are_found() {
    let reader = || thread(0).shares(0, READER, 1, "a").lets_go(30);
    assert_eq!(found([reader(), thread(1).holds(29, 2)], &[]), [OVERLAP]);
    let late = thread(1).shares(9, READER, 3, "b");
    assert_eq!(found([thread(0).holds(0, 2), late], &[]), [OVERLAP]);
    let permit =
        |n: usize, weight| thread(n).shares(n as u64, permits(weight), 0, ["a", "b", "c"][n]);
    let too_many = "3 holders at the same time:";
    assert_eq!(
        found([permit(0, 1), permit(1, 1), permit(2, 2)], &[]),
        [too_many]
    );
    // Redis has lost one of them, or the key.
    let lost = || [loses_grant(1, 2, plain("a"))];
    assert_eq!(
        found([permit(0, 1), permit(1, 1), permit(2, 2)], &lost()),
        NOTHING
    );
    assert_eq!(
        found([permit(0, 1), permit(1, 1), permit(2, 3)], &lost()),
        [OVERLAP]
    );
    assert_eq!(
        found(
            [permit(0, 1), permit(1, 1), permit(2, 3)],
            &[may_lose(1, 2)]
        ),
        NOTHING
    );
}

#[test]
fn a_reader_may_join_a_lost_lease_until_its_client_knows() {
    let first = || thread(0).shares(0, READER, 1, "a").lets_go(90);
    let joins = || thread(1).shares(60, READER, 1, "a").lets_go(90);
    let writer = || thread(2).holds(50, 2).lets_go(70);
    let lost = [loses_grant(40, 41, plain("a"))];
    assert_eq!(found([first(), joins(), writer()], &lost), NOTHING);
    assert!(found([first(), joins(), writer()], &[]).contains(&OVERLAP.to_owned()));
}

#[test]
fn readers_and_writers_have_ordered_tokens() {
    let asked = "a later request got a smaller token:";
    let held = "a later hold had a smaller token:";
    let reader = |from, token| thread(0).shares(from, READER, token, "a").lets_go(from + 5);
    let writer = |from, token| thread(1).holds(from, token).lets_go(from + 5);
    assert_eq!(found([reader(0, 5), writer(10, 5)], &[]), [asked, held]);
    assert_eq!(found([writer(0, 5), reader(10, 5)], &[]), [asked, held]);
    assert_eq!(found([reader(0, 5), writer(10, 6)], &[]), NOTHING);
    // Readers have no order among each other.
    let other = thread(1).shares(20, READER, 4, "b");
    assert_eq!(found([reader(0, 5), other], &[]), NOTHING);
}

#[test]
fn a_start_too_many_in_a_window_is_found() {
    let window = MIN_HOLD.as_millis() as u64;
    let starts = |last| {
        [
            thread(0).starts(0, 10).starts(20, 30),
            thread(1).starts(5, 40),
            thread(2).starts(6, last),
        ]
    };
    let found_in = |last, faults: &[Fault]| found(starts(last), faults).len();
    assert_eq!(found_in(window - 1, &[]), 1);
    assert_eq!(found_in(window, &[]), 0);
    assert_eq!(found_in(window - 1, &[loses_all(15, 16)]), 0);
}

#[test]
fn a_share_without_a_holder_is_found_after_its_ttl() {
    let released = || thread(0).shares(0, permits(1), 0, "a").lets_go(500);
    let seen = |last| [sighting(plain("a"), last)];
    assert_eq!(orphans([released()], &seen(3_400), &[]), 0);
    assert_eq!(orphans([released()], &seen(3_600), &[]), 1);
    // A fail-over may have granted the key to the lease once more.
    let lost = [may_lose(100, 900)];
    assert_eq!(orphans([released()], &seen(6_800), &lost), 0);
    assert_eq!(orphans([released()], &seen(7_000), &lost), 1);
}

impl Thread {
    fn transfers(self, since: u64, at: u64, before: [i64; 2]) -> Self {
        let since = since * MILLI;
        self.at(at, What::Transferred { before, since })
    }
}

#[test]
fn a_changed_sum_of_the_accounts_is_found() {
    let transfers = |before| thread(0).transfers(10, 20, before);
    let changed = ["the sum of the accounts has changed:"];
    assert_eq!(found([transfers([-7, 7])], &[]), NOTHING);
    assert_eq!(found([transfers([-8, 7])], &[]), changed);
    // The loss of all data explains nothing: a transaction changes both accounts.
    assert_eq!(found([transfers([-8, 7])], &[loses_all(5, 6)]), changed);
}

#[test]
fn a_lost_transfer_is_found() {
    let lost = ["two transfers read the same balances:"];
    let both = || {
        [
            thread(0).transfers(10, 20, [-7, 7]),
            thread(1).transfers(30, 40, [-7, 7]),
        ]
    };
    assert_eq!(found(both(), &[]), lost);
    assert_eq!(found(both(), &[loses_all(25, 26)]), NOTHING);
    assert_eq!(found(both(), &[loses_all(5, 6)]), lost);
    assert_eq!(found(both(), &[loses_all(41, 42)]), lost);
    // The loss of the locks, or of another key, explains nothing.
    assert_eq!(found(both(), &[loses(25, 26, 1)]), lost);
    assert_eq!(found(both(), &[may_lose(25, 26)]), lost);
    let [account, _] = account_keys();
    let fail_over = fault(
        25,
        26,
        Effect::MayLose {
            keys: vec![account],
        },
    );
    let faults = [fail_over];
    let (violations, explained) = all(&history(both(), &faults), &faults);
    assert!(violations.is_empty(), "{violations:?}");
    assert_eq!(explained.transfers, 1);
}

/// The grant of another key of a set.
fn of_key(key: usize, token: u64) -> Grant {
    Grant {
        key,
        ..grant(token)
    }
}

#[test]
fn every_key_of_a_set_is_held() {
    let set = || {
        thread(0)
            .granted(0, 0, grant(1))
            .at(0, What::HeldToo(of_key(5, 2)))
            .sees(0, TTL)
    };
    let other = |key| thread(1).granted(20, 20, of_key(key, 3)).sees(20, TTL);
    for key in [0, 5] {
        assert_eq!(found([set(), other(key)], &[]), [OVERLAP], "{key}");
        assert_eq!(found([set().lets_go(10), other(key)], &[]), NOTHING);
    }
    assert_eq!(found([set(), other(6)], &[]), NOTHING);
}

#[test]
fn a_loss_of_one_key_of_a_set_is_explained_alone() {
    let set = |key| {
        let reason = "Deleted".to_owned();
        thread(0)
            .granted(0, 0, grant(1))
            .at(0, What::HeldToo(of_key(5, 2)))
            .sees(0, TTL)
            .at(80, What::Lost { reason, key })
    };
    let lost = || {
        let (key, grant) = (Some(5), Some(scripted(2)));
        fault(40, 41, Effect::Loses { key, grant })
    };
    let none = "a loss was reported without a cause:";
    assert_eq!(found([set(Some(5))], &[lost()]), NOTHING);
    assert_eq!(found([set(Some(0))], &[lost()]), [none]);
    assert_eq!(found([set(Some(5))], &[]), [none]);
}

#[test]
fn a_key_stays_while_its_set_waits() {
    let found = |thread: Thread| {
        let sightings = [Sighting {
            key: 5,
            name: "cold-5".to_owned(),
            grant: scripted(9),
            first: 100 * MILLI,
            last: 8000 * MILLI,
        }];
        let longest = Duration::from_millis(TTL);
        keys_without_holders(&sightings, longest, &history([thread], &[]), &[]).len()
    };
    let waits = |keys: &[usize], until| {
        let failed = Outcome::Failed("Unavailable".to_owned());
        thread(0)
            .at(0, What::Wants { keys: keys.into() })
            .calls(50, Doing::LockSet, None)
            .returns(50, until, failed)
    };
    assert_eq!(found(waits(&[0, 5], 5100)), 0);
    assert_eq!(found(waits(&[0, 5], 4900)), 1);
    assert_eq!(found(waits(&[0, 6], 5100)), 1);
}

/// A run at most once, and one at least once.
const MOST: usize = 0;
const LEAST: usize = 1;

impl Thread {
    fn runs(self, since: u64, at: u64, key: usize, token: u64) -> Self {
        let since = since * MILLI;
        self.at(at, What::RunBegan { key, token, since })
    }

    fn finds(self, since: u64, at: u64, key: usize, token: u64) -> Self {
        let (is_done, since) = (true, since * MILLI);
        self.at(
            at,
            What::RunEnded {
                key,
                token,
                is_done,
                since,
            },
        )
    }
}

#[test]
fn work_that_runs_more_than_once_is_found() {
    let twice = "work ran more than once:";
    let both = |key| [thread(0).runs(0, 10, key, 1), thread(1).runs(5, 90, key, 2)];
    assert_eq!(found(both(MOST), &[]), [twice]);
    assert_eq!(found(both(LEAST), &[]), NOTHING);
    assert_eq!(found(both(MOST), &[loses_all(40, 41)]), NOTHING);
    assert_eq!(found(both(MOST), &[loses_all(91, 92)]), [twice]);
    // The lock was lost, but not the record.
    assert_eq!(found(both(MOST), &[loses(40, 41, 1)]), [twice]);
    let failed = thread(0)
        .granted(0, 5, of_key(MOST, 1))
        .runs(0, 10, MOST, grant(1).token)
        .at(20, What::RunFailed { key: MOST });
    let again = thread(1).runs(5, 90, MOST, grant(2).token);
    assert_eq!(found([failed, again], &[]), NOTHING);
}

#[test]
fn work_that_runs_after_its_record_is_found() {
    let again = "work ran again after its end was recorded:";
    let first = || thread(0).runs(0, 10, LEAST, 1).finds(0, 20, LEAST, 1);
    let second = |asked| thread(1).runs(asked, 90, LEAST, 2);
    assert_eq!(found([first(), second(19)], &[]), NOTHING);
    assert_eq!(found([first(), second(21)], &[]), [again]);
    assert_eq!(found([first(), second(21)], &[loses_all(40, 41)]), NOTHING);
}

#[test]
fn an_older_record_of_a_run_is_found() {
    let older = "an older record of a run came back:";
    let ran = || thread(0).runs(0, 1, LEAST, 1).runs(0, 5, LEAST, 2);
    let found_by = |asked| {
        let reader = thread(1).finds(10, 20, LEAST, 2).finds(asked, 40, LEAST, 1);
        found([ran(), reader], &[])
    };
    assert_eq!(found_by(20), NOTHING);
    assert_eq!(found_by(21), [older]);
    let foreign = thread(1).finds(10, 20, LEAST, 7);
    assert_eq!(found([ran(), foreign], &[]), ["a record is of no run:"]);
}

#[test]
fn a_fail_over_may_lose_the_records_of_all_runs() {
    let both = || {
        let key = 2 * KEYS + MOST;
        [thread(0).runs(0, 10, key, 1), thread(1).runs(5, 90, key, 2)]
    };
    let fail_over = |key| [fault(40, 41, Effect::MayLose { keys: vec![key] })];
    assert_eq!(found(both(), &fail_over(runs_key())), NOTHING);
    assert_eq!(found(both(), &fail_over(MOST)).len(), 1);
    // The record was written at some time in the call of 5 s.
    let key = 2 * KEYS + LEAST;
    let first = thread(0).runs(0, 10, key, 1).finds(0, 5_000, key, 1);
    let again = thread(1).runs(5_001, 9_000, key, 2);
    let keys = vec![runs_key()];
    let fail_over = fault(4_000, 4_001, Effect::MayLose { keys });
    assert_eq!(found([first, again], &[fail_over]), NOTHING);
}

impl Thread {
    fn observes(self, at: u64, observer: u64, state: Observed) -> Self {
        self.at(at, What::Observed { observer, state })
    }
}

#[test]
fn a_leader_whose_token_falls_is_found() {
    let fell = "the token of a leader fell for an observer:";
    let sees = |observer, next| {
        let leads = |token| Observed::Leader { token };
        thread(0)
            .observes(10, 1, leads(5))
            .observes(20, 1, Observed::Vacant)
            .observes(30, 1, Observed::Unknown)
            .observes(40, observer, leads(next))
    };
    assert_eq!(found([sees(1, 5)], &[]), NOTHING);
    assert_eq!(found([sees(1, 6)], &[]), NOTHING);
    assert_eq!(found([sees(1, 4)], &[]), [fell]);
    assert_eq!(found([sees(1, 4)], &[loses_all(15, 25)]), [fell]);
    // A new observer may see an earlier state.
    assert_eq!(found([sees(2, 4)], &[]), NOTHING);
}
