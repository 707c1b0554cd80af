//! Runs the model checker.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

/// Runs the checker until it has found `wanted`, or has visited all states. Returns the properties that it has found:
/// broken promises, and examples of properties that hold sometimes. Prints the steps that break each promise. (The
/// search is depth-first: it finds long ways, but takes less time than a search for the shortest one.)
pub(crate) fn check<M>(
    model: M,
    promises: &[&str],
    wanted: HasDiscoveries,
) -> BTreeSet<&'static str>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + PartialEq + Hash + Debug + Send + Sync,
    M::Action: Clone + PartialEq + Debug,
{
    let begin = Instant::now();
    let checker = model.checker().finish_when(wanted).spawn_dfs().join();
    let (states, took) = (checker.unique_state_count(), begin.elapsed());
    println!("{states} states in {took:.1?}");
    let mut found = BTreeSet::new();
    for (property, path) in checker.discoveries() {
        if promises.contains(&property) {
            println!("broken: {property}");
            for action in path.into_actions() {
                println!("    {action:?}");
            }
        }
        found.insert(property);
    }
    found
}
