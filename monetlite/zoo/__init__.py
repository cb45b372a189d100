"""Schedules that people share: finding one of those that come along, checking any file, contributing one."""
