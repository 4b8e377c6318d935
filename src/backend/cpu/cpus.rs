//! The number of CPUs that this process may use, counted without an allocation: a first call must also work where
//! there is no memory left.
//!
//! The rules are those of std::thread::available_parallelism, which allocates: the CPUs of the thread's affinity
//! mask, but no more than the CPU quota of the process's cgroup, or of any group above it, allows.

use std::{ffi::CStr, iter, mem, str};

use crate::cancel;

/// Enough for /proc/self/cgroup: about ten lines, each with a path.
const TEXT_BYTES: usize = 4096;

/// Where version 2 of cgroups is mounted, and the CPU controller of version 1; see file-hierarchy(7) and cgroups(7).
const MOUNT_V2: &[u8] = b"/sys/fs/cgroup";
const MOUNTS_V1: [&[u8]; 2] = [b"/sys/fs/cgroup/cpu", b"/sys/fs/cgroup/cpu,cpuacct"];

/// The number of CPUs, at least 1.
pub fn count() -> usize {
    // Opening and reading files are cancellation points.
    let _delay = cancel::delay();
    let cpus = in_affinity_mask().unwrap_or_else(online);
    quota().map_or(cpus, |quota| cpus.min(quota)).max(1)
}

fn in_affinity_mask() -> Option<usize> {
    // SAFETY: a mask is an array of integers.
    let mut mask: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: 0 is this thread, and the size is that of the mask. More CPUs than it has room for are refused.
    let refused = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), &mut mask) } != 0;
    // SAFETY: reads the mask.
    let cpus = || unsafe { libc::CPU_COUNT(&mask) } as usize;
    (!refused).then(cpus)
}

fn online() -> usize {
    // SAFETY: a name that exists.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
}

/// The CPUs that the quotas of the process's group and of those above it allow; None without a quota.
fn quota() -> Option<usize> {
    let mut text = [0; TEXT_BYTES];
    match group_of(read([b"/proc/self/cgroup", b"", b""], &mut text)?)? {
        Group::V1(path) => MOUNTS_V1.iter().filter_map(|mount| least(path, |group| quota_v1(mount, group))).min(),
        Group::V2(path) => least(path, |group| quota_v2(MOUNT_V2, group)),
    }
}

/// The smallest quota of a group and of those above it. In a container the path may be the host's, of which only the
/// container's own group is there, as the mount itself: groups that are not there have no quota.
fn least(path: &[u8], quota_of: impl FnMut(&[u8]) -> Option<usize>) -> Option<usize> {
    with_ancestors(path).filter_map(quota_of).min()
}

fn quota_v1(mount: &[u8], group: &[u8]) -> Option<usize> {
    let (mut limit, mut period) = ([0; 64], [0; 64]);
    let limit = read([mount, group, b"/cpu.cfs_quota_us"], &mut limit)?;
    let period = read([mount, group, b"/cpu.cfs_period_us"], &mut period)?;
    whole_cpus(limit, period)
}

fn quota_v2(mount: &[u8], group: &[u8]) -> Option<usize> {
    let mut text = [0; 64];
    cpu_max(read([mount, group, b"/cpu.max"], &mut text)?)
}

/// A process's group: its path below the mount of its hierarchy.
#[derive(Debug, PartialEq)]
enum Group<'a> {
    V1(&'a [u8]),
    V2(&'a [u8]),
}

/// The group that limits CPU time, from the text of /proc/self/cgroup. Version 1 says which controllers a group has, so
/// it goes before version 2.
fn group_of(text: &[u8]) -> Option<Group<'_>> {
    let mut found = None;
    for line in text.split(|&byte| byte == b'\n') {
        // number:controllers:path; a path may have colons.
        let mut fields = line.splitn(3, |&byte| byte == b':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.split(|&byte| byte == b',').any(|name| name == b"cpu") {
            return Some(Group::V1(path));
        }
        if controllers.is_empty() {
            found = Some(Group::V2(path));
        }
    }
    found
}

/// "/a/b", then "/a", then "".
fn with_ancestors(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    fn parent<'a>(path: &&'a [u8]) -> Option<&'a [u8]> {
        let slash = path.iter().rposition(|&byte| byte == b'/')?;
        path.get(..slash)
    }
    iter::successors(Some(path.strip_suffix(b"/").unwrap_or(path)), parent)
}

/// The whole CPUs in the text of cpu.max: "limit period", or "max period" for no limit.
fn cpu_max(text: &[u8]) -> Option<usize> {
    let mut words = text.trim_ascii().splitn(2, |&byte| byte == b' ');
    whole_cpus(words.next()?, words.next()?)
}

/// The whole CPUs that `limit` microseconds of work in every `period` microseconds take. A limit of -1 is none.
fn whole_cpus(limit: &[u8], period: &[u8]) -> Option<usize> {
    let number = |text: &[u8]| str::from_utf8(text.trim_ascii()).ok()?.parse::<usize>().ok();
    number(limit)?.checked_div(number(period)?)
}

/// The text of the file whose path the three parts make. Of a file longer than the buffer, the whole lines that fit.
fn read<'a>(path: [&[u8]; 3], buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut joined = [0; libc::PATH_MAX as usize];
    let mut length = 0;
    for part in path {
        joined.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    let joined = CStr::from_bytes_until_nul(&joined).ok()?;
    // SAFETY: a path that ends with a NUL.
    let file = unsafe { libc::open(joined.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    let mut filled = 0;
    loop {
        let room = &mut buffer[filled..];
        // SAFETY: writes to `room`, no more than its length.
        let read = unsafe { libc::read(file, room.as_mut_ptr().cast(), room.len()) };
        match usize::try_from(read) {
            Ok(0) | Err(_) => break,
            Ok(bytes) => filled += bytes,
        }
    }
    // SAFETY: opened above, and not used below.
    unsafe { libc::close(file) };
    if filled < buffer.len() {
        return buffer.get(..filled);
    }
    buffer.iter().rposition(|&byte| byte == b'\n').and_then(|end| buffer.get(..end))
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    #[test]
    fn the_count_is_that_of_the_standard_library() {
        let counts = || (count(), thread::available_parallelism().unwrap().get());
        let (ours, theirs) = counts();
        assert_eq!(ours, theirs);
        // On one CPU of those that this process has, in a thread of its own.
        let (ours, theirs) = thread::spawn(move || {
            // SAFETY: masks of this thread, which ends below.
            unsafe {
                let (mut all, mut one): (libc::cpu_set_t, libc::cpu_set_t) = (mem::zeroed(), mem::zeroed());
                assert_eq!(libc::sched_getaffinity(0, size_of_val(&all), &mut all), 0);
                let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &all)).unwrap();
                libc::CPU_SET(first, &mut one);
                assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
            }
            counts()
        })
        .join()
        .unwrap();
        assert_eq!((ours, theirs), (1, 1));
    }

    #[test]
    fn the_group_is_that_of_the_cpu_controller_or_of_version_2() {
        for (text, expected) in [
            ("0::/user.slice/a.scope\n", Some(Group::V2(b"/user.slice/a.scope"))),
            ("0::/\n", Some(Group::V2(b"/"))),
            ("0::/with:colons:in it", Some(Group::V2(b"/with:colons:in it"))),
            ("12:cpuset:/x\n4:cpu,cpuacct:/docker/1\n0::/y\n", Some(Group::V1(b"/docker/1"))),
            ("0::/y\n1:cpuacct,cpu:/z\n", Some(Group::V1(b"/z"))),
            ("3:cpuset:/x\n2:name=systemd:/x\n1:cpuacct:/x\n", None),
            ("2:name=systemd:/x\n0::/y", Some(Group::V2(b"/y"))),
            ("", None),
            ("\n\nno colons\none:colon\n", None),
        ] {
            assert_eq!(group_of(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn a_group_is_followed_by_those_above_it() {
        for (path, expected) in [
            ("/a/b/c", &["/a/b/c", "/a/b", "/a", ""][..]),
            ("/a", &["/a", ""]),
            ("/a/", &["/a", ""]),
            ("/", &[""]),
            ("", &[""]),
            ("/../..", &["/../..", "/..", ""]),
        ] {
            let groups: Vec<_> = with_ancestors(path.as_bytes()).map(|group| str::from_utf8(group).unwrap()).collect();
            assert_eq!(groups, expected, "{path}");
        }
    }

    #[test]
    fn a_quota_is_rounded_down_to_whole_cpus() {
        for (text, expected) in [
            ("max 100000\n", None),
            ("400000 100000\n", Some(4)),
            ("399999 100000\n", Some(3)),
            ("50000 100000", Some(0)),
            ("250000 50000\n", Some(5)),
            ("100000 0\n", None),
            ("100000\n", None),
            ("99999999999999999999 100000\n", None),
            ("\n", None),
            ("", None),
        ] {
            assert_eq!(cpu_max(text.as_bytes()), expected, "{text:?}");
        }
        for (limit, period, expected) in [
            ("-1\n", "100000\n", None),
            ("200000\n", "100000\n", Some(2)),
            ("150000\n", "100000\n", Some(1)),
            ("1000\n", "100000\n", Some(0)),
            ("200000\n", "0\n", None),
            ("200000\n", "\n", None),
        ] {
            assert_eq!(whole_cpus(limit.as_bytes(), period.as_bytes()), expected, "{limit:?} {period:?}");
        }
    }

    /// Folders as cgroups make them, with one limit in each file of `limits`.
    fn groups(name: &str, limits: &[(&str, &str)]) -> String {
        let mount = format!("{}/gradcodec-{name}-{}", std::env::temp_dir().display(), std::process::id());
        for (path, text) in limits {
            let path = format!("{mount}{path}");
            fs::create_dir_all(path.rsplit_once('/').unwrap().0).unwrap();
            fs::write(path, text).unwrap();
        }
        mount
    }

    #[test]
    fn the_smallest_quota_above_a_group_counts() {
        let two = groups(
            "two",
            &[("/cpu.max", "800000 100000\n"), ("/a/cpu.max", "300000 100000\n"), ("/a/b/cpu.max", "max 100000\n")],
        );
        let one = groups(
            "one",
            &[
                ("/cpu.cfs_quota_us", "700000\n"),
                ("/cpu.cfs_period_us", "100000\n"),
                ("/a/b/cpu.cfs_quota_us", "-1\n"),
                ("/a/b/cpu.cfs_period_us", "100000\n"),
            ],
        );
        for (path, v2, v1) in [("/a/b", 3, 7), ("/a", 3, 7), ("/", 8, 7), ("/not/there", 8, 7), ("/../..", 8, 7)] {
            let path = path.as_bytes();
            assert_eq!(least(path, |group| quota_v2(two.as_bytes(), group)), Some(v2));
            assert_eq!(least(path, |group| quota_v1(one.as_bytes(), group)), Some(v1));
        }
        assert_eq!(least(b"/a", |group| quota_v2(one.as_bytes(), group)), None);
        for folder in [one, two] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn whole_lines_of_a_long_file_are_read() {
        let folder = groups("long", &[("/text", "one\ntwo\nthree\n")]);
        for (room, expected) in [(64, Some("one\ntwo\nthree\n")), (9, Some("one\ntwo")), (4, Some("one")), (3, None)] {
            let mut buffer = vec![0; room];
            let text = read([folder.as_bytes(), b"/text", b""], &mut buffer);
            assert_eq!(text.map(|text| str::from_utf8(text).unwrap()), expected, "{room}");
        }
        let mut buffer = [0; 64];
        assert_eq!(read([folder.as_bytes(), b"/none", b""], &mut buffer), None);
        assert_eq!(read([&[b'x'; libc::PATH_MAX as usize], b"", b""], &mut buffer), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
