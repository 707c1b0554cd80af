//! The report of a run, as a folder: a page in Markdown with its plots. Measures nothing.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::Context as _;

use super::run::{Effort, Outcome, PACE, ROOM};
use super::{plot, table};

pub struct Document {
    pub machine: String,
    pub effort: Effort,
    pub results: Vec<Outcome>,
}

impl Document {
    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let failed = || format!("cannot write the report into {}", folder.display());
        fs::create_dir_all(folder).with_context(failed)?;
        fs::write(folder.join("README.md"), self.page()).with_context(failed)?;
        let ratios = plot::ratios(&self.results)?;
        fs::write(folder.join("ratios.svg"), ratios).with_context(failed)?;
        for result in &self.results {
            let file = folder.join(format!("{}.svg", result.name));
            fs::write(file, plot::waits(result)?).with_context(failed)?;
        }
        Ok(())
    }

    fn page(&self) -> String {
        let mut page = format!("# Locks under load\n\n{}\n\n", self.method());
        page += "![Pairs per second, to those of the raw commands](ratios.svg)\n";
        for result in &self.results {
            let (name, title) = (result.name, &result.title);
            let _ = write!(page, "\n## {name}\n\n{title}.\n\n");
            page += &table::markdown(result);
            let _ = write!(page, "\n![How long locks were waited for]({name}.svg)\n");
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
        } = self.effort;
        format!(
            "{machine}, over loopback. Made by `cargo xtask bench`.

Compare ratios: they are of one run, whose rounds take all ways in turn. The rest is this machine's.

- `raw`: `SET NX PX` and a script that deletes what is one's own, both awaited, on a connection per thread, \
asking again after 1 ms. `limit`: ours without the library, two connections that threads share and our scripts, \
and no care for anything that could go wrong. `drop`, `unlock`: ours, with and without waiting for the release. `rslock` \
(a task per thread), `redlock`: as they are, so they ask again after up to 200 ms; `-5ms`: after up to 5 ms.
- *ratio*: pairs of lock and release per second to those of `raw` in the same round. Median of {rounds} rounds \
of {window:?} ({contended_window:?} where all want one key), and the middle half of them.
- *fairness*: pairs of the thread that got least, to those of the one that got most. Where all want one key, \
whoever lets go and takes it again before anybody else has heard of it has many pairs and little fairness.
- *wait*: p50 / p99 / p99.9 / max from asking to having. At full speed a thread asks when it has let go: who is \
slow is asked less often meanwhile. So once more at a fixed rate, {PACE} of `raw`'s, for {paced_rounds} x \
{paced_window:?}: a thread that comes late counts from when it was to ask, and no turn is left out. \
Whoever was not {ROOM} times as fast as that rate has no figure.
- *connections* that stay open; *requests*, *bytes* (both ways) and *CPU* per pair, at full speed. One request \
can carry many locks.",
            machine = self.machine
        )
    }
}
