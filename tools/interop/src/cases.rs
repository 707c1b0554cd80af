//! The checks of one library beside leasehold. Each check fills in a part of the outcome. The lock is free before and
//! after it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::library::{Family, Library};
use crate::messages::{Grants, Order, Report, WATCHDOG, in_millis, section_key};
use crate::pair::{Pair, Side};
use crate::report::{Control, Outcome, Wakes};

/// The time in the section, in ms.
const HOLD_MS: u64 = 1;
/// The longest pause after a release, in ms.
const PAUSE_MS: u64 = 4;
/// The ttl of locks that must not expire in a case.
const LONG_MS: u64 = 10_000;
/// The ttl of locks that must expire. python-redis-lock counts whole seconds.
const SHORT_MS: u64 = 1_000;
/// The grants of one attempt of the control.
const CONTROL_GRANTS: u32 = 100;
/// The most attempts of the control until it finds an overlap.
const CONTROL_ATTEMPTS: u32 = 3;
/// Locks of Redisson that one request renews.
const RENEWED: u32 = 20;
/// The least number of our grants, in percent of theirs. If one side rarely gets the lock, the grants show nothing.
const LEAST_GRANTS_PERCENT: u32 = 10;
/// The tolerance of a measured ttl, since Redis counts in ms.
const ROUNDING: Duration = Duration::from_millis(2);

/// The amounts and limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Grants of the other library.
    pub grants: u32,
    /// Releases with a waiter, in each direction.
    pub wakes: u32,
    /// The median time from our release to the grant of a waiter that their library can wake.
    pub theirs_woken: Duration,
    /// The median time from their release to the grant of our waiter.
    pub ours_woken: Duration,
    /// How long after the end of a killed holder's ttl a waiter may get the lock.
    pub after_ttl: Duration,
}

impl Effort {
    pub fn full(grants: u32) -> Self {
        Self {
            grants,
            wakes: 11,
            theirs_woken: Duration::from_millis(100),
            ours_woken: Duration::from_millis(10),
            after_ttl: Duration::from_secs(1),
        }
    }

    /// For tests, on a busy machine where threads may stand still for a while. A waiter that is not woken waits for
    /// [`LONG_MS`].
    pub fn short() -> Self {
        Self {
            grants: 100,
            wakes: 3,
            theirs_woken: Duration::from_millis(LONG_MS / 2),
            ours_woken: Duration::from_millis(LONG_MS / 2),
            after_ttl: Duration::from_secs(10),
        }
    }
}

const LONG: Order = Order::Lock {
    ttl_ms: Some(LONG_MS),
};
const WITHOUT_TTL: Order = Order::Lock { ttl_ms: None };
const TRY: Order = Order::TryLock { ttl_ms: LONG_MS };

/// A case: its name, whether it applies to a library, and its check.
pub type Case = (
    &'static str,
    fn(Library) -> bool,
    fn(&mut Pair, Effort, &mut Outcome) -> anyhow::Result<()>,
);

/// Cases that load the machine. They run for all runtimes at the same time.
pub const LOADS: [Case; 2] = [("grants", all, grants), ("control", all, control)];

/// Cases that measure short times. They run for one runtime after another.
pub const TIMES: [Case; 2] = [
    ("their wake-ups", all, wake_theirs),
    ("our wake-ups", all, wake_ours),
];

/// Cases that mostly wait for ttls. They run for all runtimes at the same time.
pub const WAITS: [Case; 8] = [
    ("value untouched", all, untouched),
    ("our lock is taken for them", all, refused),
    (
        "late release",
        |library| !library.always_renews(),
        late_release,
    ),
    ("no ttl", |library| library.locks_without_ttl, without_ttl),
    ("two of three keys", is_rueidislock, two_of_three_keys),
    ("renewals of other locks", is_redisson, renewals_go_on),
    ("their holder killed", all, kill_theirs),
    ("our holder killed", all, kill_ours),
];

fn all(_: Library) -> bool {
    true
}

fn is_redisson(library: Library) -> bool {
    matches!(library.family, Family::Redisson { .. })
}

fn is_rueidislock(library: Library) -> bool {
    library.family == Family::Rueidislock
}

/// Both sides take the lock in turns. The counter in the section must be 1, and the total must be exact.
fn grants(pair: &mut Pair, effort: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    let (theirs, ours) = contest(pair, effort.grants, true)?;
    outcome.grants = theirs.grants;
    outcome.our_grants = ours.grants;
    outcome.longest_wait_ms = theirs.longest_wait_ms.max(ours.longest_wait_ms);
    outcome.overlaps = theirs.overlaps + ours.overlaps;
    let lost = lost(pair, &theirs, &ours)?;
    ensure!(outcome.overlaps == 0, "{} overlaps", outcome.overlaps);
    ensure!(lost == 0, "{lost} grants are missing from the total");
    let stale = theirs.stale_tokens + ours.stale_tokens;
    ensure!(stale == 0, "{stale} fencing tokens did not rise");
    let least = effort.grants * LEAST_GRANTS_PERCENT / 100;
    ensure!(
        ours.grants >= least,
        "leasehold had {} grants beside {}: there was no contest",
        ours.grants,
        theirs.grants
    );
    Ok(())
}

/// Does the same as [`grants`] without the lock of the other library. The checks must find the overlaps.
fn control(pair: &mut Pair, _: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    let mut found = Control::default();
    for _ in 0..CONTROL_ATTEMPTS {
        let (theirs, ours) = contest(pair, CONTROL_GRANTS, false)?;
        found.overlaps += theirs.overlaps + ours.overlaps;
        found.lost_updates += lost(pair, &theirs, &ours)?;
        if found.overlaps > 0 && found.lost_updates > 0 {
            break;
        }
    }
    outcome.control = found;
    ensure!(
        found.overlaps > 0 && found.lost_updates > 0,
        "a worker without the lock was not caught"
    );
    Ok(())
}

/// Makes both sides run the section, until the other library has `count` grants.
fn contest(pair: &mut Pair, count: u32, locked: bool) -> anyhow::Result<(Report, Report)> {
    for field in ["inside", "total", "token"] {
        let key = section_key(pair.library.name, field);
        let () = pair.redis(redis::cmd("DEL").arg(key))?;
    }
    let order = |count, locked| {
        Order::Grants(Grants {
            count,
            ttl_ms: LONG_MS,
            hold_ms: HOLD_MS,
            pause_ms: PAUSE_MS,
            locked,
        })
    };
    pair.order(Side::Ours, order(None, true))?;
    pair.order(Side::Theirs, order(Some(count), locked))?;
    let theirs = pair.report(Side::Theirs)?;
    // Any order ends the turns of our worker.
    let ours = pair.ask(Side::Ours, Order::Unlock)?;
    Ok((theirs, ours))
}

/// The number of grants that are missing from the total.
fn lost(pair: &mut Pair, theirs: &Report, ours: &Report) -> anyhow::Result<u32> {
    let key = section_key(pair.library.name, "total");
    let total: u32 = pair.redis(redis::cmd("GET").arg(key))?;
    Ok((theirs.grants + ours.grants).saturating_sub(total))
}

/// We hold the lock, they wait, and we release it.
fn wake_theirs(pair: &mut Pair, effort: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    let wakes = wake(pair, effort, Side::Theirs)?;
    outcome.their_wakes = wakes;
    if pair.library.is_woken {
        within(wakes, effort.theirs_woken)?;
    }
    Ok(())
}

/// They hold the lock, we wait, and they release it.
fn wake_ours(pair: &mut Pair, effort: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    let wakes = wake(pair, effort, Side::Ours)?;
    outcome.our_wakes = wakes;
    within(wakes, effort.ours_woken)
}

fn within(wakes: Wakes, limit: Duration) -> anyhow::Result<()> {
    let limit = limit.as_secs_f64() * 1e3;
    ensure!(
        wakes.median_ms <= limit,
        "a waiter was woken after {:.1} ms (median), and the limit is {limit} ms",
        wakes.median_ms
    );
    Ok(())
}

fn wake(pair: &mut Pair, effort: Effort, waiter: Side) -> anyhow::Result<Wakes> {
    let holder = waiter.other();
    let mut times = Vec::new();
    for _ in 0..effort.wakes {
        pair.must(holder, LONG)?;
        pair.wait_behind(waiter, LONG)?;
        let start = Instant::now();
        pair.order(holder, Order::Unlock)?;
        times.push(pair.granted(waiter)?.duration_since(start));
        let released = pair.report(holder)?;
        ensure!(released.done, "{holder:?}: the lock was lost");
        pair.must(waiter, Order::Unlock)?;
    }
    Wakes::of(times).context("there are wake-ups")
}

/// While they hold the lock, we ask and stop asking. Their value must stay as it is.
fn untouched(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    let key = pair.library.key(pair.library.name);
    pair.must(Side::Theirs, LONG)?;
    let dump = redis::cmd("DUMP").arg(&key).clone();
    let before: Vec<u8> = pair.redis(&dump)?;
    let ttl = pair.pttl(&key)?;
    let taken = pair.ask(Side::Ours, TRY)?;
    ensure!(!taken.done, "leasehold got a lock that is held");
    let after: Vec<u8> = pair.redis(&dump)?;
    ensure!(
        before == after,
        "the value of the other library was changed"
    );
    let is_renewed = pair.library.always_renews();
    let rest = pair.pttl(&key)?;
    ensure!(
        is_renewed || rest <= ttl,
        "its ttl grew from {ttl} to {rest} ms"
    );
    pair.must(Side::Theirs, Order::Unlock)
}

/// While we hold the lock, they find it taken, and our key has the right type and a ttl.
fn refused(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    let key = pair.library.key(pair.library.name);
    pair.must(Side::Ours, LONG)?;
    let kind: String = pair.redis(redis::cmd("TYPE").arg(&key))?;
    // A string would end Redisson's renewal of other locks.
    let wanted = match is_redisson(pair.library) {
        true => "hash",
        false => "string",
    };
    ensure!(kind == wanted, "our lock is a {kind}");
    let ttl = pair.pttl(&key)?;
    // RFencedLock regards a hash without a ttl as a free lock.
    ensure!(ttl > 0, "our lock has no ttl");
    let taken = pair.ask(Side::Theirs, TRY)?;
    ensure!(!taken.done, "the other library got a lock that is held");
    pair.must(Side::Ours, Order::Unlock)
}

/// Their lock expires, we get it, and their late release must not end ours.
fn late_release(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    let ttl_ms = Some(SHORT_MS);
    pair.must(Side::Theirs, Order::Lock { ttl_ms })?;
    pair.must(Side::Ours, LONG)?;
    let late = pair.ask(Side::Theirs, Order::Unlock)?;
    ensure!(!late.done, "the other library released our lock");
    pair.must(Side::Ours, Order::Unlock)
}

/// We wait for a key without a ttl, and never give it a ttl.
fn without_ttl(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    let key = pair.library.key(pair.library.name);
    pair.must(Side::Theirs, WITHOUT_TTL)?;
    pair.wait_behind(Side::Ours, LONG)?;
    let ttl = pair.pttl(&key)?;
    ensure!(ttl == -1, "the key has a ttl of {ttl} ms");
    pair.must(Side::Theirs, Order::Unlock)?;
    pair.granted(Side::Ours)?;
    pair.must(Side::Ours, Order::Unlock)
}

/// A holder of rueidislock that has lost its first key still has a majority, which our second guard must respect.
fn two_of_three_keys(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    let key = pair.library.key(pair.library.name);
    pair.must(Side::Theirs, LONG)?;
    let () = pair.redis(redis::cmd("DEL").arg(&key))?;
    let taken = pair.ask(Side::Ours, TRY)?;
    ensure!(!taken.done, "leasehold got a lock that is held by two keys");
    pair.must(Side::Theirs, Order::Unlock)?;
    pair.must(Side::Ours, LONG)?;
    pair.must(Side::Ours, Order::Unlock)
}

/// One request renews many locks of a Redisson client, and fails for all if one of their keys has another type.
fn renewals_go_on(pair: &mut Pair, _: Effort, _: &mut Outcome) -> anyhow::Result<()> {
    pair.must(Side::Theirs, Order::LockMany { count: RENEWED })?;
    let contend = Order::Contend {
        count: RENEWED,
        for_ms: in_millis(WATCHDOG * 3 / 2),
    };
    let grants = pair.ask(Side::Ours, contend)?.grants;
    ensure!(grants == 0, "{grants} of their locks expired");
    for number in 0..RENEWED {
        let key = format!("{}:{number}", pair.library.name);
        let kind: String = pair.redis(redis::cmd("TYPE").arg(&key))?;
        ensure!(kind == "hash", "their lock {key} is a {kind}");
    }
    pair.must(Side::Theirs, Order::UnlockMany)
}

/// We get the lock of a killed holder when its ttl has ended, and not before.
fn kill_theirs(pair: &mut Pair, effort: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    outcome.after_their_ttl_ms = Some(kill(pair, effort, Side::Theirs)?);
    Ok(())
}

/// They get the lock of a killed holder when its ttl has ended, and not before.
fn kill_ours(pair: &mut Pair, effort: Effort, outcome: &mut Outcome) -> anyhow::Result<()> {
    outcome.after_our_ttl_ms = Some(kill(pair, effort, Side::Ours)?);
    Ok(())
}

/// Returns how long after the end of the ttl the waiter got the lock, in ms.
fn kill(pair: &mut Pair, effort: Effort, holder: Side) -> anyhow::Result<f64> {
    let (waiter, key) = (holder.other(), pair.library.key(pair.library.name));
    // Redisson renews only a lock without a given ttl. leasehold renews every lock.
    let renewed = is_redisson(pair.library) && holder == Side::Theirs;
    let ttl_ms = (!renewed).then_some(SHORT_MS);
    pair.must(holder, Order::Lock { ttl_ms })?;
    // The waiter of python-redis-lock sleeps for its own ttl before it asks again.
    let ttl_ms = Some(SHORT_MS);
    pair.wait_behind(waiter, Order::Lock { ttl_ms })?;
    pair.kill(holder)?;
    let start = Instant::now();
    let rest = pair.pttl(&key)?;
    let rest = u64::try_from(rest).with_context(|| format!("the key has a ttl of {rest} ms"))?;
    let rest = Duration::from_millis(rest);
    let waited = pair.granted(waiter)?.duration_since(start);
    ensure!(
        waited + ROUNDING >= rest,
        "the waiter got the lock {:?} before the ttl ended",
        rest - waited
    );
    let late = waited.saturating_sub(rest);
    let sleeps = Duration::from_millis(SHORT_MS);
    ensure!(
        late <= effort.after_ttl + sleeps,
        "the waiter got the lock {late:?} after the ttl had ended"
    );
    // On a busy machine, the lock of the waiter may have expired by now.
    pair.ask(waiter, Order::Unlock)?;
    pair.restart(holder)?;
    Ok(late.as_secs_f64() * 1e3)
}
