//! The clocks of the nodes, and how the soak steps them. Steps within the bounds of a quorum are no faults: they may
//! coincide with faults of any other nodes.

use std::time::{Duration, Instant};

use leasehold_testbed::{Error, Server};

use super::{NODES, TTL};
use crate::random::Random;

/// A step ahead, in µs. The bound on the drift is 7 ms within a ttl of 500 ms: 1 % and 2 ms. The rest is for the drift
/// of the machine's clock.
const AHEAD: i64 = 6_000;
/// How far a clock is behind the machine's clock at most. A fence counter that is ahead, the lead of a proposal
/// and this are together less than a quarantine.
pub const BEHIND: Duration = Duration::from_millis(100);
/// A step begins within this time after its round has begun, in ms: at least a ttl before the next round begins.
const BEGIN: u64 = 400;

/// A step of a node's clock. After it, the clock is ahead of the machine's clock by `ahead` µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub at: Duration,
    pub node: usize,
    pub ahead: i64,
}

/// The clocks of the nodes.
pub struct Clocks {
    /// How far each is ahead of the machine's clock, in µs.
    ahead: [i64; NODES],
    /// When each was last set ahead.
    stepped: [Option<Instant>; NODES],
    pub steps: u64,
}

impl Clocks {
    /// The clocks of nodes that have the machine's time.
    pub fn new() -> Self {
        Self {
            ahead: [0; NODES],
            stepped: [None; NODES],
            steps: 0,
        }
    }

    /// The steps of a round: of nodes without a fault in this round. (A node in quarantine whose clock is set back
    /// stays in quarantine for longer.)
    pub fn draw(&self, random: &mut Random, has_fault: impl Fn(usize) -> bool) -> Vec<Step> {
        let mut steps = Vec::new();
        for node in 0..NODES {
            // Drawn in any case, so that the other random choices do not depend on it.
            let (at, is_back) = (random.millis(0, BEGIN), random.one_in(8));
            let back = random.millis(0, BEHIND.as_millis() as u64);
            let by = if is_back {
                -(back.as_micros() as i64)
            } else {
                AHEAD
            };
            let furthest = -(BEHIND.as_micros() as i64);
            let ahead = (self.ahead[node] + by).clamp(furthest, 0);
            if !has_fault(node) && ahead != self.ahead[node] {
                steps.push(Step { at, node, ahead });
            }
        }
        steps
    }

    /// Makes the step. Skips a step ahead within a ttl of the last one, as on a slow machine.
    pub fn step(&mut self, step: Step, node: &Server) -> Result<(), Error> {
        let Step {
            node: index, ahead, ..
        } = step;
        if ahead > self.ahead[index] {
            let last = self.stepped[index].replace(Instant::now());
            if last.is_some_and(|last| last.elapsed() <= TTL) {
                return Ok(());
            }
        }
        node.set_clock_offset(ahead)?;
        self.ahead[index] = ahead;
        self.steps += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_step_within_the_bounds() {
        let mut clocks = Clocks::new();
        let mut furthest = 0;
        for number in 0..2000 {
            let steps = clocks.draw(&mut Random::new(7, &[number]), |node| node == 4);
            for Step { at, node, ahead } in steps {
                assert!(node != 4 && at < Duration::from_millis(BEGIN));
                assert!(ahead - clocks.ahead[node] <= AHEAD, "it exceeds the drift");
                assert!((-100_000..=0).contains(&ahead), "{ahead}");
                clocks.ahead[node] = ahead;
                furthest = furthest.min(ahead);
            }
        }
        assert!(furthest < -90_000, "{furthest}");
    }
}
