//! Finds processes that have left the group of the command. On Linux, a process whose parent has ended becomes a child
//! of this program, so this program finds it. On other systems, this program does not find such processes.

use rustix::process::Pid;

/// A process that the command, or a process of the command, has started.
pub struct Left {
    pub id: Pid,
    pub name: String,
}

/// The present children of this program, without those in `known`.
#[cfg(target_os = "linux")]
pub fn children(known: &[Pid]) -> Vec<Left> {
    use std::fs;

    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let lists =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    let ids = lists.iter().flat_map(|list| list.split_whitespace());
    let ids = ids.filter_map(|id| Pid::from_raw(id.parse().ok()?));
    let left = |id: Pid| {
        let name =
            fs::read_to_string(format!("/proc/{}/comm", id.as_raw_pid())).unwrap_or_default();
        Left {
            id,
            name: name.trim_end().to_owned(),
        }
    };
    ids.filter(|id| !known.contains(id)).map(left).collect()
}

#[cfg(not(target_os = "linux"))]
pub fn children(_known: &[Pid]) -> Vec<Left> {
    Vec::new()
}

/// Makes this program the new parent of processes whose parent ends. Returns the children that it has already, which
/// the caller of this program has started.
pub fn adopt() -> Vec<Pid> {
    #[cfg(target_os = "linux")]
    // If this fails, this program does not find such processes.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    children(&[]).into_iter().map(|left| left.id).collect()
}
