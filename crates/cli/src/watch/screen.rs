//! The terminal of `leasehold watch`: opens a second screen, reads keys, and leaves the terminal as it was.

use std::io::{self, stdout};
use std::thread;
use std::time::Instant;

use leasehold::crossbeam_channel::{Receiver, bounded, never, select};
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::{DefaultTerminal, Terminal};
use rustix::process::{Signal, kill_current_process_group};

use crate::args::Watch;
use crate::exit::Failure;
use crate::job;
use crate::watch::view::{Action, View};
use crate::watch::{ListResult, received};

/// Shows the lists until a key or a signal ends the program.
pub fn show(
    lists: &Receiver<ListResult>,
    ended: &Receiver<i32>,
    options: &Watch,
) -> Result<(), Failure> {
    let mut screen = Screen::open()?;
    let mut events = read_events()?;
    let mut view = View::new(options);
    loop {
        screen.terminal.draw(|frame| view.draw(frame))?;
        select! {
            recv(lists) -> read => view.update(received(read)?, Instant::now()),
            recv(events) -> event => match event {
                Ok(Event::Key(key)) => match view.handle(key) {
                    Action::Draw => {}
                    Action::Suspend if job::has_shell() => screen.suspend()?,
                    Action::Suspend => {}
                    Action::End => return Ok(()),
                },
                // The next drawing has the new size.
                Ok(_) => {}
                // Without keys, a signal ends the program.
                Err(_) => events = never(),
            },
            recv(ended) -> _ => return Ok(()),
        }
    }
}

/// Reads keys and changes of the terminal's size, on a thread.
fn read_events() -> io::Result<Receiver<Event>> {
    let (sender, events) = bounded(0);
    let read = move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(events)
}

/// The second screen of the terminal. Its drop, and a panic, show the first one again.
struct Screen {
    /// Its drop shows the cursor.
    terminal: DefaultTerminal,
}

impl Screen {
    fn open() -> io::Result<Self> {
        let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore())?;
        Ok(Self { terminal })
    }

    /// Stops the program, as Ctrl-Z does outside of this screen.
    fn suspend(&mut self) -> io::Result<()> {
        ratatui::restore();
        self.terminal.show_cursor()?;
        // The call returns when the program is continued.
        kill_current_process_group(Signal::STOP)?;
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen)?;
        // A new terminal draws each cell again.
        self.terminal = Terminal::new(CrosstermBackend::new(stdout()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_panic_shows_the_first_screen_again() {
        let program = std::env::current_exe().expect("the system knows it");
        let test = "watch::screen::tests::panics_on_a_terminal";
        let script = format!(
            "look() {{ stty -a | tail -n +2 | tr '\\n' ' '; echo; }}; look; \
             '{}' --ignored --exact --nocapture {test}; look",
            program.display()
        );
        let output = Command::new("script")
            .args(["-qec", &script, "/dev/null"])
            .stdin(Stdio::null())
            .output()
            .expect("it can be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let settings = |line: Option<&str>| line.map(|line| line.trim().to_owned());
        let (first, last) = (settings(text.lines().next()), settings(text.lines().last()));
        assert!(first.is_some() && first == last, "{text}");
        let (on_screen, after) = text.split_once("\x1b[?1049l").expect("it was left");
        assert!(on_screen.contains("\x1b[?1049h"), "{text}");
        assert!(after.contains("a planted panic"), "{text}");
        assert!(after.contains("\x1b[?25h"), "the cursor is shown: {text}");
    }

    #[test]
    #[ignore = "the test above runs it on a terminal"]
    fn panics_on_a_terminal() {
        let mut screen = Screen::open().expect("there is a terminal");
        // This hides the cursor.
        screen.terminal.draw(|_| {}).expect("it can be drawn");
        panic!("a planted panic");
    }
}
