//! The report of a run, as a folder: a page in Markdown with its plots. Measures nothing.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Context as _;

use crate::goals::{self, Judged};
use crate::run::{Effort, Outcome, PACE, ROOM};
use crate::shares;
use crate::{plot, table};

pub struct Document {
    pub machine: String,
    pub effort: Effort,
    pub results: Vec<Outcome>,
    pub shares: Vec<shares::report::Outcome>,
    pub goals: Vec<Judged>,
}

const GOALS: &str = "Each figure is a ratio of two ways, or of one way beside busy loops and without them, in the same \
    rounds (the median round, and the middle half of the rounds), or a number of connections. *must*: the least that \
    the project asks of itself. *aim*: what it hopes for.";

impl Document {
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let failed = || format!("cannot write the report into {}", folder.display());
        fs::create_dir_all(folder).with_context(failed)?;
        fs::write(folder.join("README.md"), self.page()).with_context(failed)?;
        if !self.results.is_empty() {
            let ratios = plot::ratios(&self.results)?;
            fs::write(folder.join("ratios.svg"), ratios).with_context(failed)?;
        }
        for (file, plot) in shares::plots(&self.shares)? {
            fs::write(folder.join(file), plot).with_context(failed)?;
        }
        for result in &self.results {
            let file = folder.join(format!("{}.svg", result.name));
            fs::write(file, plot::waits(result)?).with_context(failed)?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        let mut page = match self.results.is_empty() {
            true => format!("# Locks under load\n\n{}.\n\n", self.machine),
            false => format!("# Locks under load\n\n{}\n\n", self.method()),
        };
        if !self.goals.is_empty() {
            let goals = goals::markdown(&self.goals);
            let _ = write!(page, "## Goals\n\n{GOALS}\n\n{goals}\n");
        }
        if !self.results.is_empty() {
            page += "![Pairs per second, to those of the raw commands](ratios.svg)\n";
        }
        for result in &self.results {
            let (name, title) = (&result.name, &result.title);
            let _ = write!(page, "\n## {name}\n\n{title}.\n\n");
            page += &table::markdown(result);
            let _ = write!(page, "\n![How long locks were waited for]({name}.svg)\n");
        }
        if !self.shares.is_empty() {
            let _ = write!(page, "\n# Shared locks\n\n{}\n", shares::report::METHOD);
            for (file, _) in shares::plots(&self.shares).unwrap_or_default() {
                let _ = write!(page, "\n![Shared locks: {file}]({file})\n");
            }
        }
        for result in &self.shares {
            let _ = write!(page, "\n## {}\n\n{}.\n\n", result.name, result.title);
            page += &shares::report::markdown(result);
        }
        page
    }

    fn method(&self) -> String {
        let Effort {
            rounds,
            window,
            contended_window,
            paced_rounds,
            paced_window,
            ..
        } = self.effort;
        let paced = match paced_rounds {
            0 => String::new(),
            _ => format!(
                " So each way is measured once more at a fixed rate, {PACE} of `raw`'s, for {paced_rounds} x \
                 {paced_window:?}: a late request counts from the time at which it was due, and no request is left \
                 out. A way that was not {ROOM} times as fast as that rate has no figure, and neither has a case beside \
                 busy loops."
            ),
        };
        format!(
            "{machine}, over loopback. Made by `cargo xtask bench`.

Compare ratios: they are of one run, whose rounds take all ways in turn. The other figures depend on this machine. A \
         case whose name ends with `-busy` was measured in turn with the case before it, beside one busy loop \
         (`while :; do :; done`) per core.

- `raw`: `SET NX PX` and a script that deletes the caller's own value, both awaited, on a connection per thread, \
         with a pause of 1 ms before the next attempt. `raw-piped`: the same without waiting for the reply to the \
         script. `limit`: leasehold's scripts without the library, on two connections that threads share, without \
         any handling of faults. `drop`, `unlock`: leasehold, without and with waiting for the release. `with_lock`: \
         leasehold, with a closure. `fair-mutex`: a mutex of parking_lot with fair unlock, without Redis; only the \
         holds that came from another thread. Threads that run get it before threads that sleep. `fair-queue`: a lock \
         without Redis that threads get in the order in which they asked. `rslock` (a task per thread), `redlock`: \
         with their defaults, which pause for up to 200 ms before the next attempt; `-5ms`: for up to 5 ms.
- *ratio*: pairs of lock and release per second, divided by those of `raw` in the same round. Median of {rounds} \
         rounds of {window:?} ({contended_window:?} where all want one key), and the middle half of them.
- *fairness*: pairs of the thread with the fewest, divided by those of the thread with the most. Where all want \
         one key, a way that takes the lock again before other threads notice its release has many pairs and \
         little fairness.
- *wait*: p50 / p99 / p99.9 / max from the request to the lock. At full speed a thread requests the next lock \
         when it has released the last: a slow way gets fewer requests.{paced}
- *connections* that stay open; *requests*, *bytes* (both ways) and *CPU* per pair, at full speed. One request \
         can carry many locks. *server CPU, ratio*: the CPU time of Redis per pair, \
         divided by that of `raw` in the same round; the median round.",
            machine = self.machine
        )
    }
}
