//! The project's goals for the speed of its locks, and whether a run reached them. Each goal is a ratio of two ways in
//! the same rounds, or a number of connections. Measures nothing.

use comfy_table::Table;
use leasehold_load::Way;
use serde::Serialize;

use super::cases::{RSLOCK, way_name};
use super::row::Row;
use super::run::Outcome;
use super::statistics::{Spread, compare};
use super::table::{in_markdown, written};
use crate::table::plain;

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
    way: Way,
    figure: Figure,
    must: f64,
    aim: Option<f64>,
}

#[derive(Clone, Copy)]
enum Figure {
    /// Pairs per second, divided by those of another way.
    Rate(Way),
    /// CPU time of Redis per pair, divided by that of another way.
    ServerCpu(Way),
    /// Connections that stay open.
    Connections,
}

impl Figure {
    /// Whether more is better.
    fn is_high_good(self) -> bool {
        matches!(self, Self::Rate(_))
    }

    fn compared_with(self) -> Option<Way> {
        match self {
            Self::Rate(other) | Self::ServerCpu(other) => Some(other),
            Self::Connections => None,
        }
    }
}

const fn rate(case: &'static str, way: Way, other: Way, must: f64, aim: f64) -> Goal {
    Goal {
        case,
        way,
        figure: Figure::Rate(other),
        must,
        aim: Some(aim),
    }
}

const fn server_cpu(case: &'static str, must: f64) -> Goal {
    Goal {
        case,
        way: Way::Drop,
        figure: Figure::ServerCpu(Way::Raw),
        must,
        aim: None,
    }
}

const GOALS: [Goal; 16] = [
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

/// Whether a goal of this case compares this way. The raw commands are always measured.
pub fn need(case: &str, way: Way) -> bool {
    let mut goals = GOALS.iter().filter(|goal| goal.case == case);
    goals.any(|goal| way == Way::Raw || way == goal.way || goal.figure.compared_with() == Some(way))
}

/// A goal beside what was measured.
#[derive(Debug, Serialize)]
pub struct Judged {
    /// The name of the case.
    pub case: &'static str,
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
    let goals = GOALS.iter();
    goals.filter_map(|goal| goal.judge(results)).collect()
}

impl Goal {
    fn judge(&self, results: &[Outcome]) -> Option<Judged> {
        let result = results.iter().find(|result| result.name == self.case)?;
        let row = |way: Way| result.rows.iter().find(|row| row.way() == way_name(way));
        let own = row(self.way)?;
        let other = self.figure.compared_with();
        let measured = match other {
            Some(other) => self.figure.ratio(own, row(other)?)?,
            None => Spread::of([own.connections as f64]),
        };
        Some(Judged {
            case: self.case,
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
            Figure::ServerCpu(other) => {
                format!("Redis' CPU per pair: {way} / {}", way_name(other))
            }
            Figure::Connections => format!("connections: {way}"),
        }
    }
}

impl Figure {
    fn ratio(self, own: &Row, other: &Row) -> Option<Spread> {
        match self {
            Self::Rate(_) => compare(&own.rounds.rates, &other.rounds.rates),
            Self::ServerCpu(_) => compare(&own.rounds.server_cpu, &other.rounds.server_cpu),
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
    let mut table = Table::new();
    table.set_header(HEADER);
    for goal in goals {
        table.add_row(goal.cells());
    }
    plain(table, 2)
}

pub fn markdown(goals: &[Judged]) -> String {
    in_markdown(&HEADER, 2, goals.iter().map(Judged::cells))
}

#[cfg(test)]
mod tests {
    use super::super::cases::CASES;
    use super::super::row::Rounds;
    use super::*;

    #[test]
    fn every_goal_names_a_case_and_ways_of_that_case() {
        for goal in &GOALS {
            let case = CASES.iter().find(|case| case.name == goal.case);
            let ways = case.expect("a case of the bench").ways();
            let compared = [Some(goal.way), goal.figure.compared_with()];
            for way in compared.into_iter().flatten() {
                assert!(ways.contains(&way), "{}: {way:?}", goal.case);
                assert!(need(goal.case, way), "{}: {way:?}", goal.case);
            }
            assert!(need(goal.case, Way::Raw), "{}", goal.case);
        }
        assert!(!need("64-threads", RSLOCK), "no goal compares it there");
        assert!(
            !need("4-processes-one-key", Way::Raw),
            "a case without a goal"
        );
    }

    fn row(way: Way, rates: [f64; 3], server_cpu: [f64; 3]) -> Row {
        Row::for_tests(
            "16-threads",
            way,
            Rounds {
                rates: rates.into(),
                server_cpu: server_cpu.into(),
            },
        )
    }

    /// A run of one case. In its second round, the machine is half as fast.
    fn results(drop: [f64; 3], rslock: bool) -> Vec<Outcome> {
        let mut rows = vec![
            row(Way::Raw, [100.0, 50.0, 100.0], [10.0, 20.0, 10.0]),
            row(Way::Drop, drop, [5.0, 12.0, 6.0]),
        ];
        rows.extend(rslock.then(|| row(RSLOCK, [160.0, 80.0, 160.0], [9.0; 3])));
        vec![Outcome {
            title: String::new(),
            name: "16-threads",
            machine: String::new(),
            rows,
        }]
    }

    fn judged(results: &[Outcome], figure: &str) -> (f64, &'static str) {
        let goals = judge(results);
        let goal = goals.iter().find(|goal| goal.figure == figure);
        let goal = goal.unwrap_or_else(|| panic!("no goal {figure:?} in {goals:?}"));
        (goal.measured, goal.verdict())
    }

    #[test]
    fn a_goal_is_judged_by_the_median_round() {
        let drop = "pairs/s: drop / raw";
        let results = |median: f64| results([100.0, median * 50.0, 900.0], true);
        assert_eq!(judged(&results(1.7), drop), (1.7, "MISSED"));
        assert_eq!(judged(&results(1.75), drop), (1.75, "reached"));
        assert_eq!(judged(&results(2.0), drop), (2.0, "aim reached"));
    }

    #[test]
    fn less_cpu_and_fewer_connections_are_better() {
        let results = results([200.0; 3], true);
        let cpu = "Redis' CPU per pair: drop / raw";
        assert_eq!(judged(&results, cpu), (0.6, "reached"));
        assert_eq!(judged(&results, "connections: drop"), (5.0, "MISSED"));
    }

    #[test]
    fn a_goal_is_left_out_if_its_ways_were_not_measured() {
        let words = |results: &[Outcome]| -> Vec<String> {
            let goals = judge(results).into_iter();
            goals.map(|goal| goal.figure).collect()
        };
        let rslock = "pairs/s: drop / rslock".to_owned();
        assert!(words(&results([200.0; 3], true)).contains(&rslock));
        let without = words(&results([200.0; 3], false));
        assert!(!without.contains(&rslock), "{without:?}");
        assert_eq!(without.len(), 3, "{without:?}");
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
