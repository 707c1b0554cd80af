//! The project's goals for the speed of its locks, and whether a run reached them. Each goal is a ratio of two ways in
//! the same rounds, a ratio of one way beside busy loops to the same way without them, or a number of connections.
//! Measures nothing.

use leasehold_load::{Keys, Way};
use serde::Serialize;

use crate::cases::{CASES, Form, RSLOCK, way_name};
use crate::row::Row;
use crate::run::Outcome;
use crate::statistics::{Spread, compare};
use crate::table::{in_markdown, in_terminal, written};

const HEADER: [&str; 7] = [
    "case",
    "figure",
    "measured",
    "middle half",
    "must",
    "aim",
    "",
];

struct Goal {
    /// The name of its case.
    case: &'static str,
    /// The form of the case in which `way` is measured.
    form: Form,
    way: Way,
    figure: Figure,
    must: f64,
    aim: Option<f64>,
}

#[derive(Clone, Copy)]
enum Figure {
    /// Pairs per second, divided by those of another way.
    Rate(Way),
    /// Pairs per second, divided by those of the same way on the quiet machine.
    RateToQuiet,
    /// CPU time of Redis per pair, divided by that of another way.
    ServerCpu(Way),
    /// The longest wait in a round, divided by that of another way.
    LongestWait(Way),
    /// Connections that stay open.
    Connections,
}

impl Figure {
    /// Whether more is better.
    fn is_high_good(self) -> bool {
        matches!(self, Self::Rate(_) | Self::RateToQuiet)
    }
}

const fn rate(case: &'static str, way: Way, other: Way, must: f64, aim: f64) -> Goal {
    Goal {
        case,
        form: Form::Quiet,
        way,
        figure: Figure::Rate(other),
        must,
        aim: Some(aim),
    }
}

const fn server_cpu(case: &'static str, must: f64) -> Goal {
    Goal {
        case,
        form: Form::Quiet,
        way: Way::Drop,
        figure: Figure::ServerCpu(Way::Raw),
        must,
        aim: None,
    }
}

/// The goals for a quiet machine.
const QUIET_GOALS: [Goal; 16] = [
    rate("1-thread-one-core", Way::Drop, Way::Raw, 0.9, 1.05),
    rate("1-thread-one-core", Way::Unlock, Way::Raw, 0.72, 0.8),
    server_cpu("1-thread-one-core", 1.35),
    rate("1-thread", Way::Drop, Way::PipedRaw, 0.95, 1.0),
    rate("1-thread", Way::Unlock, Way::Raw, 0.95, 1.0),
    server_cpu("1-thread", 1.35),
    rate("16-threads", Way::Drop, Way::Raw, 1.75, 2.0),
    Goal {
        aim: None,
        ..rate("16-threads", Way::Drop, RSLOCK, 1.0, 1.0)
    },
    rate("16-threads", Way::Unlock, Way::Raw, 1.1, 1.3),
    Goal {
        case: "16-threads",
        form: Form::Quiet,
        way: Way::Drop,
        figure: Figure::Connections,
        must: 4.0,
        aim: None,
    },
    server_cpu("16-threads", 0.6),
    rate("64-threads", Way::Drop, Way::Raw, 2.6, 3.0),
    server_cpu("64-threads", 0.35),
    rate("256-threads", Way::Drop, Way::Raw, 3.2, 4.0),
    rate(
        "16-threads-one-key",
        Way::WithLock,
        Way::FairMutex,
        0.6,
        0.8,
    ),
    rate(
        "16-threads-one-key",
        Way::WithLock,
        Way::FairQueue,
        0.6,
        0.8,
    ),
];

/// The workloads that have goals beside busy loops: each way that has a goal on a quiet machine, and threads that want
/// one key.
const BUSY_WORKLOADS: [(&str, Way); 12] = [
    ("1-thread-one-core", Way::Drop),
    ("1-thread-one-core", Way::Unlock),
    ("1-thread", Way::Drop),
    ("1-thread", Way::Unlock),
    ("16-threads", Way::Drop),
    ("16-threads", Way::Unlock),
    ("64-threads", Way::Drop),
    ("256-threads", Way::Drop),
    ("2-threads-one-key", Way::WithLock),
    ("4-threads-one-key", Way::WithLock),
    ("16-threads-one-key", Way::WithLock),
    ("64-threads-one-key", Way::WithLock),
];

/// The goals of a workload beside busy loops. rslock polls, so its waits for one key are no measure.
fn busy_goals(case: &'static str, way: Way) -> impl Iterator<Item = Goal> {
    let goal = move |figure, must| Goal {
        case,
        form: Form::Busy,
        way,
        figure,
        must,
        aim: None,
    };
    let has_own_keys = |name| {
        let mut cases = CASES.iter();
        cases.any(|case| case.name == name && case.keys == Keys::Own)
    };
    let longest = goal(Figure::LongestWait(RSLOCK), 2.0);
    [
        goal(Figure::RateToQuiet, 0.4),
        goal(Figure::Rate(Way::Raw), 1.0),
    ]
    .into_iter()
    .chain(has_own_keys(case).then_some(longest))
}

fn all_goals() -> impl Iterator<Item = Goal> {
    let busy = BUSY_WORKLOADS.into_iter();
    let busy = busy.flat_map(|(case, way)| busy_goals(case, way));
    QUIET_GOALS.into_iter().chain(busy)
}

/// Whether a goal needs this way in this form of the case. The raw commands are always measured.
pub fn need(case: &str, form: Form, way: Way) -> bool {
    let mut goals = all_goals().filter(|goal| goal.case == case);
    goals.any(|goal| {
        let mut needed = goal.needs().into_iter();
        needed.any(|(each, needed)| each == form && (way == needed || way == Way::Raw))
    })
}

/// A goal beside what was measured.
#[derive(Debug, Serialize)]
pub struct Judged {
    /// The name of the case, in the form in which the way was measured.
    pub case: String,
    pub figure: String,
    pub measured: f64,
    /// The middle half of the rounds.
    pub low: f64,
    pub high: f64,
    /// `false` if less is better.
    is_high_good: bool,
    must: f64,
    aim: Option<f64>,
}

/// The goals of all cases and ways that were measured.
pub fn judge(results: &[Outcome]) -> Vec<Judged> {
    all_goals().filter_map(|goal| goal.judge(results)).collect()
}

impl Goal {
    /// The form and the way that this goal compares its way with.
    fn compared_with(&self) -> Option<(Form, Way)> {
        match self.figure {
            Figure::Rate(other) | Figure::ServerCpu(other) | Figure::LongestWait(other) => {
                Some((self.form, other))
            }
            Figure::RateToQuiet => Some((Form::Quiet, self.way)),
            Figure::Connections => None,
        }
    }

    /// All forms and ways that have to be measured for this goal.
    fn needs(&self) -> impl IntoIterator<Item = (Form, Way)> {
        [(self.form, self.way)]
            .into_iter()
            .chain(self.compared_with())
    }

    fn judge(&self, results: &[Outcome]) -> Option<Judged> {
        let row = |(form, way): (Form, Way)| {
            let mut results = results.iter();
            let result = results.find(|result| result.case == self.case && result.form == form)?;
            let row = result.rows.iter().find(|row| row.way() == way_name(way))?;
            Some((&result.name, row))
        };
        let (name, own) = row((self.form, self.way))?;
        let measured = match self.compared_with() {
            Some(other) => self.figure.ratio(own, row(other)?.1)?,
            None => Spread::of([own.connections as f64]),
        };
        Some(Judged {
            case: name.clone(),
            figure: self.in_words(),
            measured: measured.median,
            low: measured.low,
            high: measured.high,
            is_high_good: self.figure.is_high_good(),
            must: self.must,
            aim: self.aim,
        })
    }

    fn in_words(&self) -> String {
        let way = way_name(self.way);
        match self.figure {
            Figure::Rate(other) => format!("pairs/s: {way} / {}", way_name(other)),
            Figure::RateToQuiet => format!("pairs/s: {way} / {way} without the loops"),
            Figure::ServerCpu(other) => {
                format!("Redis' CPU per pair: {way} / {}", way_name(other))
            }
            Figure::LongestWait(other) => {
                format!("longest wait: {way} / {}", way_name(other))
            }
            Figure::Connections => format!("connections: {way}"),
        }
    }
}

impl Figure {
    fn ratio(self, own: &Row, other: &Row) -> Option<Spread> {
        let (own, other) = (&own.rounds, &other.rounds);
        match self {
            Self::Rate(_) | Self::RateToQuiet => compare(&own.rates, &other.rates),
            Self::ServerCpu(_) => compare(&own.server_cpu, &other.server_cpu),
            Self::LongestWait(_) => compare(&own.longest, &other.longest),
            Self::Connections => None,
        }
    }
}

impl Judged {
    fn verdict(&self) -> &'static str {
        let reaches = |bound: f64| {
            if self.is_high_good {
                self.measured >= bound
            } else {
                self.measured <= bound
            }
        };
        match self.aim {
            Some(aim) if reaches(aim) => "aim reached",
            _ if reaches(self.must) => "reached",
            _ => "MISSED",
        }
    }

    fn cells(&self) -> [String; HEADER.len()] {
        let bound = if self.is_high_good { "≥" } else { "≤" };
        [
            self.case.to_owned(),
            self.figure.clone(),
            written(self.measured),
            format!("{} - {}", written(self.low), written(self.high)),
            format!("{bound} {}", self.must),
            self.aim
                .map_or("-".to_owned(), |aim| format!("{bound} {aim}")),
            self.verdict().to_owned(),
        ]
    }
}

pub fn terminal(goals: &[Judged]) -> String {
    in_terminal(&HEADER, 2, goals.iter().map(Judged::cells))
}

pub fn markdown(goals: &[Judged]) -> String {
    in_markdown(&HEADER, 2, goals.iter().map(Judged::cells))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cases::Case;
    use crate::row::Rounds;

    fn case(name: &str) -> &'static Case {
        let mut cases = CASES.iter();
        let case = cases.find(|case| case.name == name);
        case.expect("a case of the bench")
    }

    #[test]
    fn every_goal_names_a_case_and_ways_of_that_case() {
        for goal in all_goals() {
            for (form, way) in goal.needs() {
                let ways = case(goal.case).ways(form);
                assert!(ways.contains(&way), "{}: {way:?}", goal.case);
                assert!(need(goal.case, form, way), "{}: {way:?}", goal.case);
                assert!(need(goal.case, form, Way::Raw), "{}", goal.case);
            }
        }
        let quiet = |case, way| need(case, Form::Quiet, way);
        assert!(!quiet("64-threads", RSLOCK), "no goal compares it there");
        assert!(!quiet("4-processes-one-key", Way::Raw), "without a goal");
    }

    #[test]
    fn every_way_with_a_quiet_goal_has_goals_beside_busy_loops() {
        let workload = |case: &'static str, way| (case, way_name(way));
        let quiet: BTreeSet<_> = QUIET_GOALS
            .iter()
            .map(|goal| workload(goal.case, goal.way))
            .collect();
        let busy: BTreeSet<_> = BUSY_WORKLOADS
            .into_iter()
            .map(|(case, way)| workload(case, way))
            .collect();
        assert!(quiet.is_subset(&busy), "{quiet:?}");
    }

    fn row(form: Form, way: Way, rounds: Rounds) -> Row {
        Row::for_tests(&case("16-threads").name_of(form), way, rounds)
    }

    fn outcome(form: Form, rows: Vec<Row>) -> Outcome {
        let case = case("16-threads");
        Outcome {
            title: String::new(),
            name: case.name_of(form),
            case: case.name,
            form,
            machine: String::new(),
            rows,
        }
    }

    fn rounds(rates: [f64; 3], server_cpu: [f64; 3], longest: [f64; 3]) -> Rounds {
        Rounds {
            rates: rates.into(),
            server_cpu: server_cpu.into(),
            longest: longest.into(),
        }
    }

    /// A run of one case. In its second round, the machine is half as fast.
    fn results(drop: [f64; 3], rslock: bool) -> Vec<Outcome> {
        let row = |way, rates, cpu| row(Form::Quiet, way, rounds(rates, cpu, [1.0; 3]));
        let mut rows = vec![
            row(Way::Raw, [100.0, 50.0, 100.0], [10.0, 20.0, 10.0]),
            row(Way::Drop, drop, [5.0, 12.0, 6.0]),
        ];
        rows.extend(rslock.then(|| row(RSLOCK, [160.0, 80.0, 160.0], [9.0; 3])));
        vec![outcome(Form::Quiet, rows)]
    }

    /// The same run beside busy loops.
    fn busy_results(drop: [f64; 3], longest: [f64; 3]) -> Outcome {
        let row = |way, rates, longest| row(Form::Busy, way, rounds(rates, [1.0; 3], longest));
        let rows = vec![
            row(Way::Raw, [50.0, 25.0, 50.0], [1.0; 3]),
            row(Way::Drop, drop, longest),
            row(RSLOCK, [60.0, 30.0, 60.0], [10.0, 20.0, f64::NAN]),
        ];
        outcome(Form::Busy, rows)
    }

    fn judged(results: &[Outcome], case: &str, figure: &str) -> (f64, &'static str) {
        let goals = judge(results);
        let goal = goals
            .iter()
            .find(|goal| goal.case == case && goal.figure == figure);
        let goal = goal.unwrap_or_else(|| panic!("no goal {figure:?} in {goals:?}"));
        (goal.measured, goal.verdict())
    }

    #[test]
    fn a_goal_is_judged_by_the_median_round() {
        let drop = |results: &[Outcome]| judged(results, "16-threads", "pairs/s: drop / raw");
        let results = |median: f64| results([100.0, median * 50.0, 900.0], true);
        assert_eq!(drop(&results(1.7)), (1.7, "MISSED"));
        assert_eq!(drop(&results(1.75)), (1.75, "reached"));
        assert_eq!(drop(&results(2.0)), (2.0, "aim reached"));
    }

    #[test]
    fn less_cpu_and_fewer_connections_are_better() {
        let results = results([200.0; 3], true);
        let cpu = "Redis' CPU per pair: drop / raw";
        assert_eq!(judged(&results, "16-threads", cpu), (0.6, "reached"));
        let connections = judged(&results, "16-threads", "connections: drop");
        assert_eq!(connections, (5.0, "MISSED"));
    }

    #[test]
    fn speed_beside_busy_loops_is_compared_with_the_quiet_rounds() {
        let quiet = || results([200.0, 100.0, 200.0], true).into_iter();
        let judged = |rates, figure| {
            let all: Vec<_> = quiet().chain([busy_results(rates, [1.0; 3])]).collect();
            judged(&all, "16-threads-busy", figure)
        };
        let to_quiet = "pairs/s: drop / drop without the loops";
        assert_eq!(judged([80.0, 40.0, 80.0], to_quiet), (0.4, "reached"));
        assert_eq!(judged([60.0, 40.0, 60.0], to_quiet), (0.3, "MISSED"));
        let to_raw = "pairs/s: drop / raw";
        assert_eq!(judged([50.0, 40.0, 50.0], to_raw), (1.0, "reached"));
        assert_eq!(judged([40.0, 20.0, 80.0], to_raw), (0.8, "MISSED"));
    }

    #[test]
    fn longest_waits_are_compared_round_by_round() {
        let judged = |longest| {
            let all = [busy_results([80.0; 3], longest)];
            judged(&all, "16-threads-busy", "longest wait: drop / rslock")
        };
        // rslock got no lock in the third round, which is left out.
        assert_eq!(judged([10.0, 60.0, 900.0]), (2.0, "reached"));
        assert_eq!(judged([20.0, 60.0, 1.0]), (2.5, "MISSED"));
    }

    #[test]
    fn a_goal_without_measured_ways_is_left_out() {
        let words = |results: &[Outcome]| -> Vec<String> {
            let goals = judge(results).into_iter();
            goals.map(|goal| goal.figure).collect()
        };
        let rslock = "pairs/s: drop / rslock".to_owned();
        assert!(words(&results([200.0; 3], true)).contains(&rslock));
        let without = words(&results([200.0; 3], false));
        assert!(!without.contains(&rslock), "{without:?}");
        assert_eq!(without.len(), 3, "{without:?}");
        let only_busy = words(&[busy_results([80.0; 3], [1.0; 3])]);
        assert_eq!(
            only_busy,
            ["pairs/s: drop / raw", "longest wait: drop / rslock"]
        );
    }

    #[test]
    fn the_table_has_a_line_for_each_goal_with_its_bounds() {
        let goals = judge(&results([200.0, 75.0, 200.0], false));
        let text = markdown(&goals);
        let line = "| 16-threads | pairs/s: drop / raw | 2.00 | 1.75 - 2.00 | ≥ 1.75 | ≥ 2 | aim reached |";
        assert!(text.contains(line), "{text}");
        assert_eq!(text.lines().count(), 2 + goals.len(), "{text}");
    }
}
