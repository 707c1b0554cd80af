//! The figures of the article, for sixty seconds on the article's machine.

use std::fmt;

/// A number, or an upper bound ("less than") where the article has no number.
#[derive(Clone, Copy)]
pub struct Figure {
    pub number: f64,
    pub less: bool,
}

const fn just(number: f64) -> Figure {
    Figure {
        number,
        less: false,
    }
}

const fn below(number: f64) -> Figure {
    Figure { number, less: true }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let less = if self.less { "<" } else { "" };
        write!(f, "{less}{}", self.number)
    }
}

impl Figure {
    /// The ratio to `other`, as text. If one of the two figures is a bound, the ratio is a bound, too.
    pub fn over(self, other: Figure) -> String {
        let ratio = self.number / other.number;
        match (self.less, other.less) {
            (false, false) => format!("{ratio:.1}"),
            (false, true) => format!(">{ratio:.1}"),
            (true, false) => format!("<{ratio:.1}"),
            (true, true) => format!("about {ratio:.1}"),
        }
    }
}

/// The length of each run of the article, in seconds.
pub const SECONDS: f64 = 60.0;

pub struct Row {
    pub listed: Figure,
    pub bought: Figure,
    pub retries: Figure,
    /// The mean, in ms.
    pub wait: Figure,
}

const fn row(listed: f64, bought: Figure, retries: Figure, wait: Figure) -> Row {
    Row {
        listed: just(listed),
        bought,
        retries,
        wait,
    }
}

/// The rows of each load (1x1, 5x1, 5x5): the article's three ways, in the order of `Way::ALL`.
#[rustfmt::skip]
pub const TABLE: [[Row; 3]; 3] = [
    [
        row(145_000.0, just(27_000.0), just(80_000.0), just(14.0)),
        row(51_000.0, just(50_000.0), just(0.0), just(1.0)),
        row(113_000.0, just(110_000.0), just(0.0), below(1.0)),
    ],
    [
        row(331_000.0, below(200.0), just(50_000.0), just(150.0)),
        row(68_000.0, just(13_000.0), below(10.0), just(5.0)),
        row(192_000.0, just(36_000.0), just(0.0), below(2.0)),
    ],
    [
        row(206_000.0, below(600.0), just(161_000.0), just(498.0)),
        row(21_000.0, just(20_500.0), just(0.0), just(14.0)),
        row(116_000.0, just(111_000.0), just(0.0), below(3.0)),
    ],
];
