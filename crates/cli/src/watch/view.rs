//! The table of `leasehold watch`: its state, the keys that change the state, and its drawing.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Instant;

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Table};

use crate::args::Watch;
use crate::locks::{FIGURES, Grant, HEADER, Lock};
use crate::watch::ListResult;

/// The column of the holders. It gets the rest of the width.
const HOLDER: usize = 2;
/// The longest name of a lock in the table, in characters. The rest is cut off.
const LONGEST_KEY: usize = 48;
/// The help for keys.
const HELP: [(&str, &str); 5] = [
    ("w", "by waiting"),
    ("a", "by age"),
    ("n", "by name"),
    ("/", "filter"),
    ("q", "quit"),
];

/// The order of the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// The locks with the most waiting clients come first.
    Waiting,
    /// The locks that have been held longest come first.
    Age,
    Name,
}

impl Order {
    /// The column that gives the order.
    fn column(self) -> usize {
        match self {
            Self::Name => 0,
            Self::Age => 3,
            Self::Waiting => 5,
        }
    }
}

/// The action after a key press.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Draw,
    Suspend,
    End,
}

pub struct View {
    /// The part of the title about which locks are listed, and how often.
    subject: String,
    /// The last list, in the chosen order.
    locks: Vec<Lock>,
    is_complete: bool,
    /// The error of the last read, if it failed.
    failure: Option<String>,
    order: Order,
    /// Only locks with this text in their name or in that of a holder are shown.
    filter: String,
    /// Whether keys change the filter.
    is_editing: bool,
    /// The number of locks above the first visible one.
    above: usize,
    /// The number of rows in the last drawing.
    rows: usize,
    /// When each grant in the last list was first seen.
    first_seen: HashMap<Grant, Instant>,
}

impl View {
    pub fn new(options: &Watch) -> Self {
        let under = match &*options.start {
            "" => String::new(),
            start => format!(" under {start:?}"),
        };
        Self {
            subject: format!("{under}, every {:?}", options.interval),
            locks: Vec::new(),
            is_complete: true,
            failure: None,
            order: Order::Waiting,
            filter: String::new(),
            is_editing: false,
            above: 0,
            rows: 1,
            first_seen: HashMap::new(),
        }
    }

    /// Takes the result of an attempt to read the list. After a failure, the last list stays.
    pub fn update(&mut self, read: ListResult, now: Instant) {
        match read {
            Ok((locks, is_complete)) => {
                (self.locks, self.is_complete, self.failure) = (locks, is_complete, None);
                self.set_ages(now);
                self.sort();
            }
            Err(failure) => self.failure = Some(failure.message),
        }
    }

    /// Sets how long each grant has been on the screen. Redis does not know the age of most locks.
    fn set_ages(&mut self, now: Instant) {
        let mut first_seen = HashMap::with_capacity(self.locks.len());
        for lock in &mut self.locks {
            lock.set_seen(|grant| {
                let since = self.first_seen.get(&grant).copied().unwrap_or(now);
                first_seen.insert(grant, since);
                now - since
            });
        }
        self.first_seen = first_seen;
    }

    fn sort(&mut self) {
        let locks = &mut self.locks;
        // The locks that are equal in the chosen order stay in the order of their names.
        locks.sort_by(|one, other| one.key().cmp(other.key()));
        match self.order {
            Order::Name => {}
            Order::Age => locks.sort_by_key(|lock| Reverse(lock.least_age())),
            Order::Waiting => locks.sort_by_key(|lock| Reverse(lock.clients_waiting())),
        }
    }

    fn set_order(&mut self, order: Order) {
        self.order = order;
        self.sort();
        self.above = 0;
    }

    /// Handles a key.
    pub fn handle(&mut self, key: KeyEvent) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Draw;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c' | '\\') => Action::End,
                KeyCode::Char('z') => Action::Suspend,
                _ => Action::Draw,
            };
        }
        if self.is_editing {
            match key.code {
                KeyCode::Char(c) => self.filter.push(c),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Enter => self.is_editing = false,
                KeyCode::Esc => {
                    self.filter.clear();
                    self.is_editing = false;
                }
                _ => {}
            }
            self.above = 0;
            return Action::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return Action::End,
            KeyCode::Char('w') => self.set_order(Order::Waiting),
            KeyCode::Char('a') => self.set_order(Order::Age),
            KeyCode::Char('n') => self.set_order(Order::Name),
            KeyCode::Char('/') => self.is_editing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Down => self.above = self.above.saturating_add(1),
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::PageDown => self.above = self.above.saturating_add(self.rows),
            KeyCode::PageUp => self.above = self.above.saturating_sub(self.rows),
            KeyCode::Home => self.above = 0,
            KeyCode::End => self.above = usize::MAX,
            _ => {}
        }
        Action::Draw
    }

    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let parts = [
            Constraint::Length(1),
            Constraint::Fill(1),
            Constraint::Length(1),
        ];
        let [top, middle, bottom] = Layout::vertical(parts).areas(frame.area());
        // The header takes one line.
        self.rows = usize::from(middle.height).saturating_sub(1).max(1);
        let locks = self.locks.iter();
        let shown: Vec<&Lock> = locks.filter(|lock| lock.matches(&self.filter)).collect();
        self.above = self.above.min(shown.len().saturating_sub(self.rows));
        frame.render_widget(self.title(shown.len()), top);
        let visible = shown.iter().skip(self.above).take(self.rows);
        frame.render_widget(
            table(visible.map(|lock| lock.cells()).collect(), self.order),
            middle,
        );
        frame.render_widget(self.footer(), bottom);
    }

    fn title(&self, shown: usize) -> Line<'_> {
        if let Some(failure) = &self.failure {
            return Line::from(failure.as_str()).red().bold();
        }
        let all = self.locks.len();
        let more = if self.is_complete { "" } else { " and more" };
        let count = match &*self.filter {
            "" => format!("{all} locks{more}"),
            filter => format!("{shown} of {all} locks{more} with {filter:?}"),
        };
        let waiting: usize = self.locks.iter().map(Lock::clients_waiting).sum();
        let rest = format!("{}; clients waiting: {waiting}", self.subject);
        Line::from(vec![count.bold(), rest.into()])
    }

    fn footer(&self) -> Line<'_> {
        if self.is_editing {
            return Line::from(vec!["/".bold(), self.filter.as_str().into(), "_".into()]);
        }
        let help = |(key, meaning): (&'static str, &'static str)| -> [Span<'_>; 3] {
            [key.bold(), " ".into(), format!("{meaning}   ").dim()]
        };
        Line::from(HELP.map(help).concat())
    }
}

/// A table of these rows. Marks the column that gives the order.
fn table(rows: Vec<[String; 6]>, order: Order) -> Table<'static> {
    let width = |column: usize| {
        let cells = rows.iter().map(|cells| cells[column].chars().count());
        // The header may have a mark.
        let longest = cells.max().unwrap_or(0).max(HEADER[column].len() + 2);
        let longest = longest.min(LONGEST_KEY);
        Constraint::Length(u16::try_from(longest).unwrap_or(u16::MAX))
    };
    let widths: [Constraint; 6] = std::array::from_fn(|column| match column {
        HOLDER => Constraint::Fill(1),
        _ => width(column),
    });
    let cell = |column: usize, text: String| match FIGURES.contains(&column) {
        true => Cell::from(Line::from(text).right_aligned()),
        false => Cell::from(text),
    };
    let row = |cells: [String; 6]| {
        let cells = cells.into_iter().enumerate();
        Row::new(cells.map(|(column, text)| cell(column, text)))
    };
    let mark = |column: usize| if column == order.column() { " ▾" } else { "" };
    let header = std::array::from_fn(|column| format!("{}{}", HEADER[column], mark(column)));
    Table::new(rows.into_iter().map(row), widths)
        .header(row(header).style(Style::new().bold().reversed()))
        .column_spacing(2)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::exit::{AWAY, Failure};

    /// A view, and the screen on which it is drawn.
    struct TestScreen {
        view: View,
        terminal: Terminal<TestBackend>,
        now: Instant,
    }

    impl TestScreen {
        fn new() -> Self {
            let options = Watch {
                start: String::new(),
                interval: Duration::from_secs(1),
                max: 10,
            };
            Self {
                view: View::new(&options),
                terminal: Terminal::new(TestBackend::new(100, 7)).expect("it is in memory"),
                now: Instant::now(),
            }
        }

        /// Reads a list with these locks: the name, the age in seconds, and the number of waiting clients.
        fn update(&mut self, locks: &[(&str, Option<u64>, usize)]) {
            let lock = |&(key, age, waiting): &(&str, Option<u64>, usize)| {
                Lock::example(key, age.map(Duration::from_secs), waiting)
            };
            let locks = locks.iter().map(lock).collect();
            self.view.update(Ok((locks, true)), self.now);
        }

        fn press(&mut self, code: KeyCode) {
            assert_eq!(self.view.handle(KeyEvent::from(code)), Action::Draw);
        }

        /// The lines of the screen.
        fn lines(&mut self) -> Vec<String> {
            let view = &mut self.view;
            let drawn = self.terminal.draw(|frame| view.draw(frame));
            let buffer = drawn.expect("it is in memory").buffer;
            let rows = buffer.content.chunks(usize::from(buffer.area.width));
            let text = |row: &[ratatui::buffer::Cell]| -> String {
                row.iter().map(ratatui::buffer::Cell::symbol).collect()
            };
            rows.map(|row| text(row).trim_end().to_owned()).collect()
        }

        /// The names of the locks in the visible rows.
        fn keys(&mut self) -> String {
            let lines = self.lines();
            let rows = &lines[2..lines.len() - 1];
            rows.iter().filter_map(|row| row.chars().next()).collect()
        }
    }

    #[test]
    fn keys_choose_the_order_and_the_rows() {
        let mut screen = TestScreen::new();
        screen.update(&[("f", None, 0)]);
        screen.now += Duration::from_secs(90);
        screen.update(&[
            ("a", None, 0),
            ("b", None, 0),
            ("c", None, 0),
            ("d", Some(3_600), 0),
            ("e", None, 2),
            ("f", None, 0),
        ]);
        assert_eq!(screen.keys(), "eabc", "four rows have room");
        let lines = screen.lines();
        assert_eq!(lines[0], "6 locks, every 1s; clients waiting: 2");
        assert!(lines[1].ends_with("WAITING ▾"), "{lines:?}");
        screen.press(KeyCode::Char('a'));
        assert_eq!(screen.keys(), "dfab");
        let lines = screen.lines();
        assert!(lines[2].contains(" 1h 00m "), "{lines:?}");
        assert!(lines[3].contains(" > 1m 30s "), "it was seen: {lines:?}");
        screen.press(KeyCode::Char('n'));
        assert_eq!(screen.keys(), "abcd");
        for (key, keys) in [
            (KeyCode::Down, "bcde"),
            (KeyCode::End, "cdef"),
            (KeyCode::Down, "cdef"),
            (KeyCode::Up, "bcde"),
            (KeyCode::PageUp, "abcd"),
            (KeyCode::PageDown, "cdef"),
            (KeyCode::Home, "abcd"),
        ] {
            screen.press(key);
            assert_eq!(screen.keys(), keys, "{key:?}");
        }
        screen.terminal.backend_mut().resize(120, 9);
        assert_eq!(screen.keys(), "abcdef", "the screen is larger");
        screen.terminal.backend_mut().resize(10, 1);
        screen.lines();
    }

    #[test]
    fn a_filter_hides_locks() {
        let mut screen = TestScreen::new();
        screen.update(&[("a", None, 0), ("b", None, 0)]);
        for key in "/q!".chars().map(KeyCode::Char) {
            screen.press(key);
        }
        assert_eq!((&*screen.keys(), &*screen.lines()[6]), ("", "/q!_"));
        screen.press(KeyCode::Backspace);
        screen.press(KeyCode::Backspace);
        screen.press(KeyCode::Char('b'));
        assert_eq!(screen.keys(), "b");
        screen.press(KeyCode::Enter);
        assert!(screen.lines()[0].starts_with(r#"1 of 2 locks with "b","#));
        screen.press(KeyCode::Esc);
        assert_eq!(screen.keys(), "ab");
    }

    #[test]
    fn an_outage_is_shown_above_the_last_list() {
        let mut screen = TestScreen::new();
        screen.update(&[("a", None, 0)]);
        let failure = Failure::new(AWAY, "Redis does not answer");
        screen.view.update(Err(failure), screen.now);
        assert_eq!(screen.lines()[0], "Redis does not answer");
        assert_eq!(screen.keys(), "a");
        screen.update(&[]);
        assert!(screen.lines()[0].starts_with("0 locks,"));
    }

    #[test]
    fn keys_end_and_stop_the_program() {
        let mut view = TestScreen::new().view;
        let control = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
        assert_eq!(view.handle(KeyEvent::from(KeyCode::Char('q'))), Action::End);
        assert_eq!(view.handle(control('z')), Action::Suspend);
        view.handle(KeyEvent::from(KeyCode::Char('/')));
        assert_eq!(view.handle(control('c')), Action::End);
    }
}
