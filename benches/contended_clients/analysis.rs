//! Derives the figures of one window of time from the logs of all workers.

use std::ops::Range;
use std::time::Duration;

use crate::workers::Career;

/// The most grants that one other client gets during a wait if clients are served in order: one because it was ahead,
/// and one because it asked again before the waiter's request reached the server.
pub const IN_ORDER: usize = 2;

/// Times are in ns.
#[derive(Default)]
pub struct Analysis {
    pub grants: usize,
    /// The waits for the grants in the window, sorted.
    pub waits: Vec<u64>,
    /// The longest wait, including waits that did not end in the window.
    pub longest_wait: u64,
    /// The number of waiting workers times the mean time between grants.
    pub fair_wait: f64,
    /// The most grants to one other client during one wait.
    pub most_grants_to_another: usize,
    /// The most later requests that were granted before one request.
    pub most_overtaken: usize,
    /// The times from the end of a hold to the next grant, sorted.
    pub gaps: Vec<u64>,
    /// Workers without a grant that waited for longer than they should.
    pub without_grant: usize,
    pub holders_together: usize,
    pub tokens_out_of_order: usize,
    pub leases_lost: usize,
    pub errors: Vec<String>,
}

struct Grant {
    worker: usize,
    asked: u64,
    entered: u64,
    left: u64,
    token: u64,
}

/// Analyses a window in which `waiting` workers compete all the time. No wait should be longer than `bound`.
pub fn analyse(
    careers: &[Career],
    window: &Range<u64>,
    waiting: usize,
    bound: Duration,
) -> Analysis {
    let grants = all_grants(careers);
    let mut analysis = Analysis {
        grants: grants
            .iter()
            .filter(|grant| window.contains(&grant.entered))
            .count(),
        ..Analysis::default()
    };
    let length = (window.end - window.start) as f64;
    analysis.fair_wait = waiting as f64 * length / analysis.grants as f64;
    for pair in grants.windows(2) {
        let [earlier, later] = pair else { continue };
        analysis.tokens_out_of_order += usize::from(later.token <= earlier.token);
        if window.contains(&later.entered) {
            analysis
                .gaps
                .push(later.entered.saturating_sub(earlier.left));
        }
    }
    analysis.gaps.sort_unstable();
    analysis.waits = grants
        .iter()
        .filter(|grant| window.contains(&grant.entered))
        .map(|grant| grant.entered - grant.asked)
        .collect();
    analysis.waits.sort_unstable();
    order(&grants, window, careers.len(), &mut analysis);
    starvation(careers, window, bound, &mut analysis);
    for career in careers {
        let turns = &career.turns;
        analysis.holders_together += turns.turns.iter().filter(|turn| turn.company).count();
        analysis.leases_lost += turns.turns.iter().filter(|turn| turn.lost).count();
        analysis.errors.extend(turns.errors.iter().cloned());
    }
    analysis
}

/// All grants, in their order.
fn all_grants(careers: &[Career]) -> Vec<Grant> {
    let mut grants = Vec::new();
    for (worker, career) in careers.iter().enumerate() {
        for turn in &career.turns.turns {
            let Some(entered) = turn.entered else {
                continue;
            };
            let left = turn.left.or(career.killed).unwrap_or(entered);
            grants.push(Grant {
                worker,
                asked: turn.asked,
                entered,
                left,
                token: turn.token,
            });
        }
    }
    grants.sort_unstable_by_key(|grant| grant.entered);
    grants
}

fn order(grants: &[Grant], window: &Range<u64>, workers: usize, analysis: &mut Analysis) {
    let mut counts = vec![0_usize; workers];
    for (at, grant) in grants.iter().enumerate() {
        if !window.contains(&grant.entered) {
            continue;
        }
        let first = grants.partition_point(|other| other.entered <= grant.asked);
        let during = &grants[first.min(at)..at];
        let mut overtaken = 0;
        for other in during {
            counts[other.worker] += 1;
            let count = counts[other.worker];
            analysis.most_grants_to_another = analysis.most_grants_to_another.max(count);
            overtaken += usize::from(other.asked > grant.asked);
        }
        analysis.most_overtaken = analysis.most_overtaken.max(overtaken);
        for other in during {
            counts[other.worker] = 0;
        }
    }
}

/// Counts waits without an end in the window, and workers without a grant. A stopped worker cannot be granted
/// the lock.
fn starvation(careers: &[Career], window: &Range<u64>, bound: Duration, analysis: &mut Analysis) {
    analysis.longest_wait = analysis.waits.last().copied().unwrap_or(0);
    for career in careers.iter().filter(|career| !career.was_stopped) {
        let end = career.killed.unwrap_or(window.end).min(window.end);
        let mut longest = 0;
        let mut served = false;
        for turn in &career.turns.turns {
            served |= turn
                .entered
                .is_some_and(|entered| window.contains(&entered));
            let ended_later = turn.entered.is_none_or(|entered| entered >= window.end);
            if ended_later && turn.asked < end {
                longest = longest.max(end - turn.asked);
            }
        }
        analysis.longest_wait = analysis.longest_wait.max(longest);
        let waited_long = u128::from(longest) > bound.as_nanos();
        analysis.without_grant += usize::from(!served && waited_long);
    }
}

/// A quantile of sorted values; 0 without values.
pub fn quantile(sorted: &[u64], quantile: f64) -> u64 {
    let at = (sorted.len() as f64 * quantile) as usize;
    sorted.get(at).or(sorted.last()).copied().unwrap_or(0)
}

pub fn mean(values: &[u64]) -> f64 {
    values.iter().sum::<u64>() as f64 / values.len().max(1) as f64
}
